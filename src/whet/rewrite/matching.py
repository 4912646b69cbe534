"""Reading arithmetic that exporters spelled out: products taken apart into a number and factors, whatever their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.constants import scalar


@dataclass
class Product:
    """number * factors[0] * factors[1] * ...; `layers` are the Mul and Div layers that spelled it out."""

    number: float = 1.0
    factors: list[Tensor] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


def product(g: Graph, t: Tensor) -> Product:
    """`t` as a product: through Mul, and Div by a constant number, as far as nobody else reads what is between."""
    found = Product()
    _multiply(g, t, found, top=True)
    return found


def _multiply(g: Graph, t: Tensor, found: Product, *, top: bool = False) -> None:
    layer = g.maker(t)
    if layer is None or layer.op not in ("Mul", "Div") or not (top or g.shared(t, *g.readers(t)[:1]) is None):
        found.factors.append(t)
        return
    a, b = layer.inputs
    number = scalar(b)
    if layer.op == "Div":
        if number is None or not number:
            found.factors.append(t)
            return
        found.layers.append(layer)
        found.number /= number
        _operand(g, a, found)
        return
    found.layers.append(layer)
    _operand(g, a, found)
    _operand(g, b, found)


def _operand(g: Graph, t: Tensor | None, found: Product) -> None:
    number = scalar(t)
    if number is not None:
        found.number *= number
    elif t is not None:
        _multiply(g, t, found)


def is_factor(g: Graph, layer: Layer) -> bool:
    """Whether the layer's result only goes into a product with a number: that one is the root to look at."""
    readers = g.readers(layer.output)
    return len(readers) == 1 and readers[0].op in ("Mul", "Div") and any(scalar(t) is not None for t in readers[0].inputs)


def near(a: float | None, b: float, rtol: float = 1e-5) -> bool:
    """Whether a number that an exporter wrote down means `b`."""
    return a is not None and abs(a - b) <= rtol * abs(b)


def sum_with(g: Graph, t: Tensor | None, number: float) -> Tensor | None:
    """x, when `t` is x + number by an Add (either way round); None otherwise."""
    layer = g.maker(t)
    if layer is None or layer.op != "Add":
        return None
    for x, other in (layer.inputs, layer.inputs[::-1]):
        if near(scalar(other), number, 1e-6):
            return x
    return None


def made_by(g: Graph, t: Tensor | None, op: str) -> Layer | None:
    """The layer of this op that makes `t`; None otherwise."""
    layer = g.maker(t)
    return layer if layer is not None and layer.op == op else None


def private(g: Graph, root: Layer, interior: list[Layer]) -> str | None:
    """Why the layers of a pattern cannot go: a value inside is an output or read outside; None when they can."""
    inside = {root, *interior}
    for layer in interior:
        for t in layer.outputs:
            if g.is_output(t):
                return f"%{t.name} is an output of the network"
            other = next((r for r in g.readers(t) if r not in inside), None)
            if other is not None:
                return f"%{t.name} is also read by '{other.name}'"
    return None

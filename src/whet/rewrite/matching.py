"""Matching arithmetic that exporters decompose: products as a constant times factors, in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph


@dataclass
class Product:
    """number * factors[0] * factors[1] * ...; `layers` are the Mul and Div layers that compute it."""

    number: float = 1.0
    factors: list[Tensor] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)


def match_product(g: Graph, t: Tensor) -> Product:
    """`t` as a product, through Mul and Div by a constant, as far as intermediate values have no other readers."""
    product = Product()
    _multiply(g, t, product, is_root=True)
    return product


def _multiply(g: Graph, t: Tensor, product: Product, *, is_root: bool = False) -> None:
    layer = g.maker(t)
    if layer is None or layer.op not in ("Mul", "Div") or not (is_root or g.escapes(t, *g.readers(t)[:1]) is None):
        product.factors.append(t)
        return
    a, b = layer.inputs
    number = scalar_value(b)
    if layer.op == "Div":
        if number is None or not number:
            product.factors.append(t)
            return
        product.layers.append(layer)
        product.number /= number
        _multiply_operand(g, a, product)
        return
    product.layers.append(layer)
    _multiply_operand(g, a, product)
    _multiply_operand(g, b, product)


def _multiply_operand(g: Graph, t: Tensor | None, product: Product) -> None:
    number = scalar_value(t)
    if number is not None:
        product.number *= number
    elif t is not None:
        _multiply(g, t, product)


def is_factor(g: Graph, layer: Layer) -> bool:
    """True if the layer's only reader multiplies or divides by a constant: then that reader is the root of the product."""
    readers = g.readers(layer.output)
    return len(readers) == 1 and readers[0].op in ("Mul", "Div") and any(scalar_value(t) is not None for t in readers[0].inputs)


def is_close(a: float | None, b: float, rtol: float = 1e-5) -> bool:
    """True if `a` equals `b` up to the rounding of exporters."""
    return a is not None and abs(a - b) <= rtol * abs(b)


def match_add_constant(g: Graph, t: Tensor | None, number: float) -> Tensor | None:
    """x, when `t` is x + number or number + x; None otherwise."""
    layer = g.maker(t)
    if layer is None or layer.op != "Add":
        return None
    for x, other in (layer.inputs, layer.inputs[::-1]):
        if is_close(scalar_value(other), number, 1e-6):
            return x
    return None


def find_maker_of_op(g: Graph, t: Tensor | None, op: str) -> Layer | None:
    """The layer that produces `t` if it has this operation; None otherwise."""
    layer = g.maker(t)
    return layer if layer is not None and layer.op == op else None


def match_inverse_root(g: Graph, t: Tensor | None, *, inverted: bool) -> tuple[Tensor, list[Layer]] | None:
    """(v, layers), when `t` is 1 / sqrt(v), or sqrt(v) if `inverted`; as Sqrt, Pow, Reciprocal or a division of 1. None otherwise."""
    layer = g.maker(t)
    if layer is None or not layer.inputs:
        return None
    value = layer.inputs[0]
    power = scalar_value(layer.inputs[1]) if layer.op == "Pow" else None
    if value is not None and ((layer.op == "Sqrt" and inverted) or power == (0.5 if inverted else -0.5)):
        return value, [layer]
    if inverted:
        return None
    root = layer.inputs[0] if layer.op == "Reciprocal" else layer.inputs[1] if layer.op == "Div" and scalar_value(layer.inputs[0]) == 1.0 else None
    inner = match_inverse_root(g, root, inverted=True)
    return None if inner is None else (inner[0], [layer, *inner[1]])


def find_interior_escape(g: Graph, root: Layer, interior: list[Layer]) -> str | None:
    """Why the layers of a matched pattern cannot be removed: an intermediate value is an output or read outside. None when they can."""
    inside = {root, *interior}
    for layer in interior:
        for t in layer.outputs:
            if g.is_output(t):
                return f"%{t.name} is an output of the network"
            other = next((r for r in g.readers(t) if r not in inside), None)
            if other is not None:
                return f"%{t.name} is also read by '{other.name}'"
    return None

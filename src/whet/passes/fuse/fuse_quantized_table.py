"""What computes 8-bit integers from 8-bit integers one by one becomes one look-up in a table of 256, whatever it computes on the way."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import ACTIVATIONS, fuse
from whet.passes._graph import Graph
from whet.passes._quantize import unfit_activation

KIND = "QuantizedTable"
ARITHMETIC = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
UNARY = (*(a for a in ACTIVATIONS if a != "PRelu"), "Abs", "Erf", "Exp", "Neg", "Reciprocal", "Sqrt")


@rule("QuantizeLinear", phase=Phase.FUSE, after=["fuse_quantized"])
def fuse_quantized_table(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """Numbers on the way may be read by other QuantizeLinear layers too: each makes its own table of the same integers."""
    found = _way(g, layer)
    if found is None:
        return None
    source, steps = found
    if reason := unfit_activation(source) or unfit_activation(layer):
        return Skip(reason)
    if source.output.type != layer.inputs[0].type:
        return Skip(f"%{layer.inputs[0].name} is broadcast")
    for x in steps:
        if g.is_output(x.output):
            return Skip(f"%{x.output.name} is an output of the network")
        others = [r for r in g.readers(x.output) if r not in steps and not (r.op == "QuantizeLinear" and x.output is layer.inputs[0])]
        if others:
            return Skip(f"%{x.output.name} is also read by '{others[0].name}', in floating point")
    return fuse(g, KIND, source, *steps, layer)


def _way(g: Graph, layer: Layer) -> tuple[Layer, list[Layer]] | None:
    """The DequantizeLinear that all comes from, and the layers between it and `layer` in running order; None where there is more to it."""
    source: Layer | None = None
    steps: dict[Layer, None] = {}
    waiting = [layer.inputs[0]]
    while waiting:
        maker = g.maker(waiting.pop())
        if maker is None:
            return None
        if maker.op == "DequantizeLinear":
            if source not in (None, maker) or maker.inputs[0].is_constant:
                return None
            source = maker
        elif maker not in steps:
            if maker.op not in ARITHMETIC and maker.op not in UNARY:
                return None
            steps[maker] = None
            for t in maker.inputs:
                if t is None or (t.is_constant and t.type.elements == 1):
                    continue
                waiting.append(t)
    return None if source is None else (source, sorted(steps, key=g.place))

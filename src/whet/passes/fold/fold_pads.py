"""Folds a Pad into the padding of the convolution or pooling that reads it, if the result is the same."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops.pad import pad_amounts
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("AveragePool", "Conv", "MaxPool", phase=Phase.FOLD, level=0)
def fold_pads(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    pad = g.maker(x)
    if pad is None or x is None or pad.op != "Pad" or len(layer.outputs) != 1 or layer.op not in ("AveragePool", "Conv", "MaxPool"):
        return None
    source, value = pad.inputs[0], pad.input(2)
    if pad.attrs.get("mode", "constant") != "constant":
        return Skip(f"'{pad.name}' pads in mode {pad.attrs['mode']}, a {layer.op} with a constant")
    if value is not None and scalar_value(value) is None:
        return Skip(f"'{pad.name}' pads with values computed at run time")
    padding = pad_amounts(pad)
    if not all(isinstance(p, int) for both in padding for p in both):
        return Skip(f"'{pad.name}' pads by amounts that follow from a dynamic size")
    if any(a or b for a, b in padding[:2]):
        return Skip(f"'{pad.name}' pads the batch or the channels")
    if any(a < 0 or b < 0 for a, b in padding):
        return Skip(f"'{pad.name}' crops (a negative pad)")
    if reason := g.escapes(x, layer):
        return Skip(reason)
    rank = len(padding) - 2
    own = tuple(layer.attrs.get("pads") or (0,) * 2 * rank)
    added = tuple(a for a, _ in padding[2:]) + tuple(b for _, b in padding[2:])
    total = tuple(a + b for a, b in zip(own, added, strict=True))
    if reason := _why_different(g, layer, source, 0.0 if value is None else scalar_value(value), own, total):
        return Skip(reason)
    added_attrs = {"count_include_pad": 1} if layer.op == "AveragePool" else {}
    return g.add(layer.op, source, *layer.inputs[1:], **{**layer.attrs, "pads": total, **added_attrs})


def _why_different(g: Graph, layer: Layer, source: Tensor | None, value: float | None, own: tuple, total: tuple) -> str | None:
    """The reason why the layer's own padding would change the result, or None."""
    if layer.op == "Conv":
        return None if value == 0 else f"the Pad's value is {value}, a convolution pads with 0"
    kernel = layer.attrs["kernel_shape"]
    if any(p >= k for p, k in zip(total, (*kernel, *kernel), strict=True)):
        return f"pads {total} would give {layer.op} windows that are outside the image"
    if layer.attrs.get("ceil_mode"):
        return f"{layer.op} rounds its output size up, which depends on the layer that pads"
    if layer.op == "AveragePool":
        if value != 0:
            return f"the Pad's value is {value}, AveragePool counts padding as 0"
        return "AveragePool excludes its own padding from the mean" if any(own) and not layer.attrs.get("count_include_pad") else None
    if value == float("-inf") or (value == 0 and _is_nonnegative(g, source, 4)):
        return None
    return f"MaxPool's own padding is never the maximum, the Pad's {value} may be"


def _is_nonnegative(g: Graph, t: Tensor | None, depth: int) -> bool:
    """True if all values of `t` are known to be 0 or more (or NaN)."""
    layer = g.maker(t)
    if layer is None or depth == 0:
        return False
    if layer.op in ("Relu", "Sigmoid", "HardSigmoid", "Softplus", "Abs", "Softmax"):
        return True
    if layer.op == "Clip":
        low = scalar_value(layer.input(1))
        return low is not None and low >= 0
    if layer.op in ("MaxPool", "AveragePool", "Concat", "Identity", "Transpose"):
        return all(_is_nonnegative(g, x, depth - 1) for x in layer.inputs)
    return False

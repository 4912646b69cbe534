"""Moves QuantizeLinear before a Split when all parts are quantized with the same scale."""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_scales, scale_inputs
from whet.rewrite.rules import Phase, Skip, rule


@rule("Split", phase=Phase.FOLD, after=["move_quantize"])
def move_quantize_split(g: Graph, layer: Layer) -> Sequence[Tensor] | Skip | None:
    x = layer.inputs[0]
    if x is None or not x.dtype.is_float or g.maker(x) is None:
        return None  # network inputs are quantized at their readers
    readers = [g.readers(t) for t in layer.outputs]
    quantizers = [r for rs in readers for r in rs if r.op == "QuantizeLinear"]
    if not quantizers:
        return None
    if any(g.is_output(t) for t in layer.outputs) or any(r.op != "QuantizeLinear" for rs in readers for r in rs) or not all(readers):
        return Skip("some of its parts are used as floating point")
    scales = [find_scales(q) for q in quantizers]
    if scales[0] is None or not scales[0].per_tensor or any(s != scales[0] for s in scales):
        return Skip("its parts are quantized with different scales, or with scales computed at run time")
    first = quantizers[0]
    attrs = {k: first.attrs[k] for k in ("saturate", "output_dtype") if k in first.attrs}
    q = g.add("QuantizeLinear", x, *scale_inputs(first), **attrs)
    parts = g.add("Split", q, *layer.inputs[1:], **layer.attrs)
    parts = parts if isinstance(parts, tuple) else (parts,)
    # The QuantizeLinear of each part cancels with its DequantizeLinear in cancel_quantize.
    return [g.add("DequantizeLinear", p, *scale_inputs(first)) for p in parts]

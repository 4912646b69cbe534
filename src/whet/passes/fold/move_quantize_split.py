"""QuantizeLinear moves before a Split when all parts are quantized alike: one Q on the whole, then its parts."""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import scale_inputs, scales_of
from whet.rewrite.rules import Phase, Skip, rule


@rule("Split", phase=Phase.FOLD, after=["move_quantize"])
def move_quantize_split(g: Graph, layer: Layer) -> Sequence[Tensor] | Skip | None:
    x = layer.inputs[0]
    if x is None or not x.dtype.is_float or g.maker(x) is None:
        return None  # what the caller feeds stays as it is until it is needed
    readers = [g.readers(t) for t in layer.outputs]
    quantizers = [r for rs in readers for r in rs if r.op == "QuantizeLinear"]
    if not quantizers:
        return None
    if any(g.is_output(t) for t in layer.outputs) or any(not r.op == "QuantizeLinear" for rs in readers for r in rs) or not all(readers):
        return Skip("some of its parts are used as floating point")
    found = [scales_of(q) for q in quantizers]
    if found[0] is None or not found[0].per_tensor or any(f != found[0] for f in found):
        return Skip("its parts are quantized with different scales, or with ones that are not known")
    first = quantizers[0]
    attrs = {k: first.attrs[k] for k in ("saturate", "output_dtype") if k in first.attrs}
    q = g.add("QuantizeLinear", x, *scale_inputs(first), **attrs)
    parts = g.add("Split", q, *layer.inputs[1:], **layer.attrs)
    parts = parts if isinstance(parts, tuple) else (parts,)
    # Each part's own Q undoes its DQ: cancel_quantize takes both away.
    return [g.add("DequantizeLinear", p, *scale_inputs(first)) for p in parts]

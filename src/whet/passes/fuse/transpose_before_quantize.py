"""Moves the QuantizeLinear of attention's result after the Transpose that follows, which then becomes part of the attention layer.

Phase FOLD moves QuantizeLinear before layers that only move values, towards a layer that can store integers. Attention computes in floating point; its
kernels write the result with any strides.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.quantization import find_scales, scale_inputs
from whet.rewrite.rules import Phase, Skip, rule


@rule("Transpose", phase=Phase.FUSE, after=("recognize_attention",), level=2)
def transpose_before_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    quantize = find_maker_of_op(g, layer.inputs[0], "QuantizeLinear")
    attention = None if quantize is None else g.maker(quantize.inputs[0])
    if quantize is None or attention is None or attention.composite != "Attention":
        return None
    if layer.attrs["perm"][-1] != layer.output.type.rank - 1:
        return None  # attention's kernels write the elements of a row next to each other
    scales = find_scales(quantize)
    if scales is None or not scales.per_tensor:
        return Skip(f"%{quantize.output.name} does not have one constant scale")
    if reason := g.escapes(quantize.output, layer) or g.escapes(attention.output, quantize):
        return Skip(reason)
    moved = g.add("Transpose", attention.output, perm=layer.attrs["perm"])
    attrs = {k: quantize.attrs[k] for k in ("saturate", "output_dtype") if k in quantize.attrs}
    return g.add("QuantizeLinear", moved, *scale_inputs(quantize), **attrs)

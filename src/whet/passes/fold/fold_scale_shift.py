"""Folds a Mul, Div, Add or Sub with a constant per channel into the weights of the Conv, ConvTranspose or Gemm before it.

A Mul or Div is folded into constant weights of a MatMul too."""

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._scale import Affine, channel_axis, finite, fold_into, vector
from whet.rewrite.constants import scalar_weight
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_HEADS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@rule("Add", "Div", "Mul", "Sub", phase=Phase.FOLD, after=["fold_batch_norm"], level=0)
def fold_scale_shift(g: Graph, layer: Layer) -> Tensor | Skip | None:
    swaps = (layer.inputs, layer.inputs[::-1]) if layer.op in ("Add", "Mul") else (layer.inputs,)
    for value, other in swaps:
        head = g.maker(value)
        if value is None or other is None or head is None or head.op not in _HEADS or not other.is_constant:
            continue
        if head.op == "MatMul" and (layer.op in ("Add", "Sub") or head.inputs[1] is None or not head.inputs[1].is_constant):
            continue  # fuse_matmul_bias and fuse_gemm_scale handle these
        if layer.output.type != value.type:
            return Skip(f"%{other.name}: {other.type} broadcasts %{value.name}: {value.type}")
        per_channel = vector(other, value, channel_axis(head))
        if per_channel is None:
            return Skip(f"%{other.name}: {other.type} does not have one value per channel of %{value.name}: {value.type}")
        if not finite(per_channel) or (layer.op == "Div" and not per_channel.array.all()):
            return Skip(f"%{other.name} has values that cannot be folded (infinity, NaN or a division by 0)")
        match layer.op:
            case "Mul":
                affine = Affine(factor=per_channel)
            case "Div":
                affine = Affine(factor=express("Div", scalar_weight(1.0), per_channel))
            case "Add":
                affine = Affine(shift=per_channel)
            case _:
                affine = Affine(shift=express("Sub", scalar_weight(0.0), per_channel))
        return fold_into(g, head, layer, affine)
    return None

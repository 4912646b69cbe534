"""A Mul, Div, Add or Sub by a constant a channel goes into the weights of the Conv, ConvTranspose or Gemm before it.

A Mul or Div goes into those of a MatMul too, when they are constant."""

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
            continue  # fuse_matmul_bias and fuse_gemm_scale do what they can there
        if layer.output.type != value.type:
            return Skip(f"%{other.name}: {other.type} broadcasts %{value.name}: {value.type}")
        found = vector(other, value, channel_axis(head))
        if found is None:
            return Skip(f"%{other.name}: {other.type} has not one value a channel of %{value.name}: {value.type}")
        if not finite(found) or (layer.op == "Div" and not found.array.all()):
            return Skip(f"%{other.name} holds values that no weight can take in (infinite, NaN or a division by 0)")
        match layer.op:
            case "Mul":
                affine = Affine(factor=found)
            case "Div":
                affine = Affine(factor=express("Div", scalar_weight(1.0), found))
            case "Add":
                affine = Affine(shift=found)
            case _:
                affine = Affine(shift=express("Sub", scalar_weight(0.0), found))
        return fold_into(g, head, layer, affine)
    return None

"""Folds a Mul, Div, Add or Sub with a constant per channel into the weights of the Conv, ConvTranspose or Gemm before it.

A Mul or Div is folded into constant weights of a MatMul too, past its bias if there is one."""

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._scale import Affine, are_finite, fold_into, get_channel_axis, make_folded_name, to_channel_vector
from whet.rewrite.constants import make_scalar_weight, round_to
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_HEADS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@rule("Add", "Div", "Mul", "Sub", phase=Phase.FOLD, after=["fold_batch_norm"], level=0)
def fold_scale_shift(g: Graph, layer: Layer) -> Tensor | Skip | None:
    swaps = (layer.inputs, layer.inputs[::-1]) if layer.op in ("Add", "Mul") else (layer.inputs,)
    for value, other in swaps:
        head = g.maker(value)
        if layer.op in ("Mul", "Div") and value is not None and other is not None:
            below = _scale_through_bias(g, layer, value, other)
            if below is not None:
                return below
        if value is None or other is None or head is None or head.op not in _HEADS or not other.is_constant:
            continue
        if head.op == "MatMul" and (layer.op in ("Add", "Sub") or head.inputs[1] is None or not head.inputs[1].is_constant):
            continue  # fuse_matmul_bias and fuse_gemm_scale handle these
        if layer.output.type != value.type:
            return Skip(f"%{other.name}: {other.type} broadcasts %{value.name}: {value.type}")
        per_channel = to_channel_vector(other, value, get_channel_axis(head))
        if per_channel is None:
            return Skip(f"%{other.name}: {other.type} does not have one value per channel of %{value.name}: {value.type}")
        if not are_finite(per_channel) or (layer.op == "Div" and not per_channel.array.all()):
            return Skip(f"%{other.name} has values that cannot be folded (infinity, NaN or a division by 0)")
        match layer.op:
            case "Mul":
                affine = Affine(factor=per_channel)
            case "Div":
                affine = Affine(factor=express("Div", make_scalar_weight(1.0), per_channel))
            case "Add":
                affine = Affine(shift=per_channel)
            case _:
                affine = Affine(shift=express("Sub", make_scalar_weight(0.0), per_channel))
        return fold_into(g, head, layer, affine)
    return None


def _scale_through_bias(g: Graph, layer: Layer, value: Tensor, other: Tensor) -> Tensor | Skip | None:
    """(x @ w + b) * c as x @ (w * c) + b * c, for constants w, b and c along the columns; None for other values."""
    add = find_maker_of_op(g, value, "Add")
    if add is None:
        return None
    for product, bias in (add.inputs, add.inputs[::-1]):
        head = find_maker_of_op(g, product, "MatMul")
        if head is None or product is None or bias is None or head.inputs[1] is None or not (head.inputs[1].is_constant and bias.is_constant):
            continue
        axis = product.type.rank - 1
        factor, shift = to_channel_vector(other, product, axis), to_channel_vector(bias, product, axis)
        if factor is None or shift is None or layer.output.type != product.type or not product.dtype.is_float:
            return None
        if not are_finite(factor, shift) or (layer.op == "Div" and not factor.array.all()):
            return Skip(f"%{other.name} or %{bias.name} has values that cannot be folded (infinity, NaN or a division by 0)")
        if reason := g.escapes(value, layer) or g.escapes(product, add):
            return Skip(reason)
        factor = factor if layer.op == "Mul" else express("Div", make_scalar_weight(1.0), factor)
        scaled = fold_into(g, head, add, Affine(factor=factor))
        if isinstance(scaled, Skip):
            return scaled
        return g.add("Add", scaled, g.constant(round_to(express("Mul", shift, factor), bias.dtype), make_folded_name(bias)))
    return None

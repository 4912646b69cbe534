"""Reading QuantizeLinear (Q) and DequantizeLinear (DQ) layers: their scales, whether two agree, what can stand in a quantized layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import F8E4M3, I8, U8, DType, Layer, Tensor
from whet.ops import get_op
from whet.ops.quantize_linear import output_dtype
from whet.passes._fuse import CONVS, PRODUCTS, anchored
from whet.passes._graph import Graph

WEIGHTED = (*CONVS, *PRODUCTS)
_EIGHT_BIT = (I8, U8, F8E4M3)


@dataclass(frozen=True)
class Scales:
    """What a Q or DQ layer computes with, comparable: two of equal scales undo each other. `zeros` is None where all are 0."""

    dtype: DType
    scale: bytes
    zeros: bytes | None
    axis: int | None  # None: one scale for the tensor
    block: int

    @property
    def per_tensor(self) -> bool:
        return self.axis is None and not self.block


def scales_of(layer: Layer) -> Scales | None:
    """The scales of a Q or DQ layer; None when they are computed at run time."""
    scale, zero = layer.inputs[1], layer.input(2)
    if scale is None or scale.weight is None or (zero is not None and zero.weight is None):
        return None
    dtype = output_dtype(layer) if layer.op == "QuantizeLinear" else layer.inputs[0].dtype
    values = np.asarray(scale.array(), np.float64).reshape(-1)
    whole = values.size == 1 and not layer.attrs["block_size"]
    zeros = None if zero is None or not np.any(zero.array()) else np.ascontiguousarray(zero.array()).tobytes()
    rank = layer.output.type.rank
    axis = None if whole else layer.attrs["axis"] % max(rank, 1)
    return Scales(dtype, values.tobytes(), zeros, axis, layer.attrs["block_size"])


def is_op(layer: Layer | None, op: str) -> bool:
    return layer is not None and layer.op == op


def dequantizer(g: Graph, t: Tensor | None) -> Layer | None:
    """The DequantizeLinear that makes `t`, or None."""
    layer = g.maker(t)
    return layer if layer is not None and layer.op == "DequantizeLinear" else None


def scale_inputs(layer: Layer) -> tuple[Tensor | None, ...]:
    """The scale, and the zero point where there is one."""
    return layer.inputs[1:]


def unfit_activation(layer: Layer) -> str | None:
    """Why a Q or DQ layer of an activation cannot stand in a quantized layer: one scale, 8 bits (e4m3 saturates); None when it can."""
    found = scales_of(layer)
    what = "%" + (layer.output.name if layer.op == "QuantizeLinear" else layer.inputs[0].name)
    if found is None:
        return f"the scale of {what} is computed at run time"
    if not found.per_tensor:
        return f"{what} has more than one scale; activations are computed with one for the whole tensor"
    if found.dtype not in _EIGHT_BIT:
        return f"{what} is {found.dtype}; quantized layers compute in 8 bits"
    if found.dtype == F8E4M3 and (found.zeros is not None or not layer.attrs.get("saturate", 1)):
        return f"{what} is float8 with a zero point, or does not saturate"
    return None


def unfit_weights(head_op: str, attrs: dict, dq: Layer) -> str | None:
    """Why dequantized weights cannot stand in a quantized layer: i8 or e4m3, symmetric, a scale in all or one an output channel; or None."""
    w, found = dq.needs(0), scales_of(dq)
    if w.weight is None:
        return unfit_activation(dq) if head_op == "MatMul" else f"the weights %{w.name} are computed at run time"
    if found is None:
        return f"the scales of %{w.name} are computed at run time"
    if found.dtype not in (I8, F8E4M3):
        return f"the weights %{w.name} are {found.dtype}; quantized layers take them as i8 or e4m3"
    if found.zeros is not None:
        return f"the weights %{w.name} have zero points; quantized layers take symmetric ones"
    if found.per_tensor:
        return None
    if found.block:
        return f"the weights %{w.name} have a scale for each block of {found.block}"
    own = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0 if attrs.get("transB") else 1, "MatMul": w.type.rank - 1}[head_op]
    if found.axis != own or (head_op == "ConvTranspose" and attrs.get("group", 1) != 1):
        return f"the scales of %{w.name} lie along axis {found.axis}, not along the output channels"
    return None


def quantized_members(g: Graph, head: Layer) -> list[Layer] | str | None:
    """The DQ layers that go into the quantized form of a Conv, Gemm or MatMul (plain, or Fused with its epilogue).

    None when neither its input nor its weights are dequantized, or when it is quantized already; text when only part of it fits.
    """
    composite = anchored(head, WEIGHTED)
    if not composite:
        return None
    own, outer = _anchor(head)
    if own is None:
        return None
    x, w = (outer.get(t) for t in own.inputs[:2])
    left, right = dequantizer(g, x), dequantizer(g, w)
    if left is None and right is None:
        return None
    if left is None:
        return f"%{x.name if x else '?'} is not quantized, the weights of '{head.name}' are: put Q/DQ before it"
    if right is None:
        return f"the weights of '{head.name}' are not quantized, its input is: put Q/DQ on them"
    if reason := unfit_activation(left) or unfit_weights(composite, dict(own.attrs), right):
        return reason
    one, other = (dq.inputs[0].dtype for dq in (left, right))
    if (one == F8E4M3) != (other == F8E4M3):
        return f"the input of '{head.name}' is {one}, its weights are {other}: products are of integers or of float8"
    found: dict[Layer, None] = {left: None, right: None}
    for t in head.inputs:
        dq = dequantizer(g, t)
        if dq is not None and dq not in found:
            if reason := unfit_activation(dq):
                return reason
            found[dq] = None
    return list(found)


def _anchor(head: Layer) -> tuple[Layer | None, dict[Tensor, Tensor | None]]:
    """The layer that computes, and what each tensor that it reads is outside; None for one that is quantized already."""
    if head.op != "Fused":
        return head, {t: t for t in head.inputs if t is not None}
    body = head.regions["body"]
    if any(x.op == "DequantizeLinear" for x in body.layers):
        return None, {}
    own = next((x for x in body.layers if x.op == head.composite), None)
    return own, dict(zip(body.inputs, head.inputs, strict=True))


def fold(layer: Layer):
    """The constant that a Q or DQ layer of constants makes, with its origin."""
    from whet.ops._origin import express

    args = [None if t is None else t.weight for t in layer.inputs]
    kept = {k: v for k, v in layer.attrs.items() if k in get_op(layer.op).attrs}
    return express(layer.op, *args, **kept)

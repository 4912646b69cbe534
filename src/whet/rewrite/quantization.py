"""QuantizeLinear (Q) and DequantizeLinear (DQ) layers: their scales, and whether they can be part of a quantized fused layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.network import F8E4M3, I8, U8, DType, Layer, Tensor, Weight
from whet.ops import get_op
from whet.ops._origin import express
from whet.ops.quantize_linear import get_output_dtype
from whet.rewrite.fusing import CONVS, PRODUCTS, find_root_op
from whet.rewrite.graph import Graph

WEIGHTED = (*CONVS, *PRODUCTS)
_EIGHT_BIT = (I8, U8, F8E4M3)


@dataclass(frozen=True)
class Scales:
    """The parameters of a Q or DQ layer, comparable: two layers with equal scales cancel. `zeros` is None if all zero points are 0."""

    dtype: DType
    scale: bytes
    zeros: bytes | None
    axis: int | None  # None: one scale for the tensor
    block: int

    @property
    def per_tensor(self) -> bool:
        """True if one scale holds for the whole tensor."""
        return self.axis is None and not self.block


def find_scales(layer: Layer) -> Scales | None:
    """The scales of a Q or DQ layer; None when they are computed at run time."""
    scale, zero = layer.inputs[1], layer.input(2)
    if scale is None or scale.weight is None or (zero is not None and zero.weight is None):
        return None
    dtype = get_output_dtype(layer) if layer.op == "QuantizeLinear" else layer.needs(0).dtype
    values = np.asarray(scale.array(), np.float64).reshape(-1)
    per_tensor = values.size == 1 and not layer.attrs["block_size"]
    zeros = None if zero is None or not np.any(zero.array()) else np.ascontiguousarray(zero.array()).tobytes()
    rank = layer.output.type.rank
    axis = None if per_tensor else layer.attrs["axis"] % max(rank, 1)
    return Scales(dtype, values.tobytes(), zeros, axis, layer.attrs["block_size"])


def find_dequantizer(g: Graph, t: Tensor | None) -> Layer | None:
    """The DequantizeLinear that produces `t`, or None."""
    layer = g.maker(t)
    return layer if layer is not None and layer.op == "DequantizeLinear" else None


def scale_inputs(layer: Layer) -> tuple[Tensor | None, ...]:
    """The scale, and the zero point if there is one."""
    return layer.inputs[1:]


def find_activation_obstacle(layer: Layer) -> str | None:
    """Why the Q or DQ layer of an activation cannot be part of a quantized layer; None when it can.

    It needs one constant scale and 8 bits; float8 e4m3 must saturate and have no zero point.
    """
    scales = find_scales(layer)
    name = "%" + (layer.output.name if layer.op == "QuantizeLinear" else layer.needs(0).name)
    if scales is None:
        return f"the scale of {name} is computed at run time"
    if not scales.per_tensor:
        return f"{name} has more than one scale; quantized layers take one per activation tensor"
    if scales.dtype not in _EIGHT_BIT:
        return f"{name} is {scales.dtype}; quantized layers compute in 8 bits"
    if scales.dtype == F8E4M3 and (scales.zeros is not None or not layer.attrs.get("saturate", 1)):
        return f"{name} is float8 with a zero point, or does not saturate"
    return None


def find_weights_obstacle(root: str, attrs: Mapping[str, Any], dq: Layer) -> str | None:
    """Why the dequantized weights of a `root` operation cannot be part of a quantized layer; None when they can.

    They must be i8 or e4m3, symmetric, with one scale or one per output channel.
    """
    w, scales = dq.needs(0), find_scales(dq)
    if w.weight is None:
        return find_activation_obstacle(dq) if root == "MatMul" else f"the weights %{w.name} are computed at run time"
    if scales is None:
        return f"the scales of %{w.name} are computed at run time"
    if scales.dtype not in (I8, F8E4M3):
        return f"the weights %{w.name} are {scales.dtype}; quantized layers take them as i8 or e4m3"
    if scales.zeros is not None:
        return f"the weights %{w.name} have zero points; quantized layers take symmetric ones"
    if scales.per_tensor:
        return None
    if scales.block:
        return f"the weights %{w.name} have a scale for each block of {scales.block}"
    channel_axis = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0 if attrs.get("transB") else 1, "MatMul": w.type.rank - 1}[root]
    if scales.axis != channel_axis or (root == "ConvTranspose" and attrs.get("group", 1) != 1):
        return f"the scales of %{w.name} lie along axis {scales.axis}, not along the output channels"
    return None


def find_quantized_members(g: Graph, head: Layer) -> list[Layer] | str | None:
    """The DQ layers that become part of the quantized form of a Conv, Gemm or MatMul (plain, or fused with its epilogue).

    None when neither its input nor its weights are dequantized, or when it is quantized already. A reason when only a part of it can be quantized.
    """
    root = find_root_op(head, WEIGHTED)
    if not root:
        return None
    own, outer = _find_root_layer(head)
    if own is None:
        return None
    x, w = (None if t is None else outer.get(t) for t in own.inputs[:2])
    left, right = find_dequantizer(g, x), find_dequantizer(g, w)
    if left is None and right is None:
        return None
    if left is None:
        return f"%{x.name if x else '?'} is not quantized, the weights of '{head.name}' are: put Q/DQ before it"
    if right is None:
        return f"the weights of '{head.name}' are not quantized, its input is: put Q/DQ on them"
    if reason := find_activation_obstacle(left) or find_weights_obstacle(root, own.attrs, right):
        return reason
    data, weights = (dq.needs(0).dtype for dq in (left, right))
    if (data == F8E4M3) != (weights == F8E4M3):
        return f"the input of '{head.name}' is {data}, its weights are {weights}: products are of integers or of float8"
    members: dict[Layer, None] = {left: None, right: None}
    for t in head.inputs:
        dq = find_dequantizer(g, t)
        if dq is not None and dq not in members:
            if reason := find_activation_obstacle(dq):
                return reason
            members[dq] = None
    return list(members)


def _find_root_layer(head: Layer) -> tuple[Layer | None, dict[Tensor, Tensor | None]]:
    """(the root operation, the outer tensor of each tensor that it reads); None for a layer that is quantized already."""
    if head.op != "Fused":
        return head, {t: t for t in head.inputs if t is not None}
    body = head.regions["body"]
    if any(x.op == "DequantizeLinear" for x in body.layers):
        return None, {}
    root = next((x for x in body.layers if x.op == head.composite), None)
    return root, dict(zip(body.inputs, head.inputs, strict=True))


def fold_constant(layer: Layer) -> Weight:
    """The result of a Q or DQ layer with constant inputs, with its provenance."""
    weights = [None if t is None else t.weight for t in layer.inputs]
    attrs = {k: v for k, v in layer.attrs.items() if k in get_op(layer.op).attrs}
    return express(layer.op, *weights, **attrs)

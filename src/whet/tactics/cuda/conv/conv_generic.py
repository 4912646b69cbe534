"""Convolutions and products that no tensor-core kernel takes (f32, groups, odd channel counts): one thread a value. Slow, always there.

For coverage: no other kernel computes these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Float32, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    FLOAT16_TYPES,
    TYPE,
    GpuKernel,
    all_static,
    count_blocks,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, refuses
from whet.tactics.cuda.conv.conv import get_conv_shape, make_packed_bias
from whet.tactics.cuda.gemm.gemm import get_gemm_shape, why_not_product


@dataclass(frozen=True)
class ConvGenericArguments(Arguments, kernel="conv_generic.cu"):
    input: ConstPointer
    weights: ConstFloatPointer
    bias: ConstFloatPointer
    residual: ConstPointer
    out: Pointer
    count: Int64  # n * p * q * k
    h: Int32
    w: Int32
    c: Int32
    p: Int32
    q: Int32
    k: Int32
    r: Int32
    s: Int32
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    group_c: Int32
    group_k: Int32
    has_residual: Int32  # 1: added before the activation, 2: after it
    act: ActivationParameters
    in_zero: Float32 = 0.0
    per_step: Float32 = 0.0
    zero: Float32 = 0.0
    add_step: Float32 = 0.0
    add_shift: Float32 = 0.0
    factor: ConstFloatPointer = 0

    @classmethod
    def of(cls, s: ConvShape, groups: int, addresses: tuple[int, int, int, int, int], post_ops: PostOps, **quantized: Any) -> ConvGenericArguments:
        """The arguments for a shape; `addresses` are those of input, weights, bias, residual (0: none) and output."""
        sizes = (s.h, s.w, s.c, s.p, s.q, s.k, s.r, s.s, *s.stride, s.pad[0], s.pad[1], *s.dilation, s.c // groups, s.k // groups)
        return cls(*addresses, s.m * s.k, *sizes, has_residual=post_ops.residual, act=post_ops.activation[1:], **quantized)


@tactic
class ConvGeneric(Tactic):
    """Conv of two spatial axes with any groups; Gemm and MatMul with a constant matrix."""

    ops = ("Conv", "Gemm", "MatMul")
    fallback = True

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or why_not_product(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or self.why_not(layer):
            return []
        head, steps = get_root_layer(layer), find_epilogue_steps(layer)
        x, form = get_source_index(layer), "nhwc" if head.op == "Conv" else "linear"
        signatures = []
        for dtype in list_float_types([head.inputs[0], layer.outputs[0]], (F16, BF16, F32)):
            others = [p.other for p in steps or () if p.other is not None and not layer.needs(p.other).is_constant]
            if any(layer.needs(i).type.rank != layer.outputs[0].type.rank for i in others):
                continue
            signatures.append(make_stored_signature(layer, {i: Operand(form, dtype) for i in (*others, x)}, Operand(form, dtype)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        head = get_root_layer(layer)
        epilogue = match_epilogue(layer, find_epilogue_steps(layer), 1 if head.op == "Conv" else layer.outputs[0].type.rank - 1)
        if isinstance(epilogue, str):
            return epilogue
        shape = get_conv_shape(layer) if head.op == "Conv" else get_gemm_shape(layer)
        tensor_cores = machine_has(backend, "wgmma") and signature.outputs[0].dtype in FLOAT16_TYPES
        one_group = head.op != "Conv" or head.attrs["group"] == 1
        if tensor_cores and one_group and refuses(shape, head.op == "Conv" and epilogue.residual is None) is None:
            return "a tensor-core kernel takes this"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        head = get_root_layer(layer)
        conv = head.op == "Conv"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer), 1 if conv else layer.outputs[0].type.rank - 1)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        s = get_conv_shape(layer) if conv else get_gemm_shape(layer)
        group = head.attrs["group"] if conv else 1
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        transposed = not conv and (head.op == "MatMul" or not head.attrs.get("transB"))

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            if not conv:
                given = (given.T if transposed else given)[:, :, None, None]
            return given.transpose(2, 3, 1, 0)  # [r, s, c of a group, k]

        size = int(np.prod(static_shape(weights.shape))) * 4
        packed = (
            make_packed_array(f"{weights.constant().digest}|direct {transposed} f32", size, filters),
            make_packed_bias(epilogue, own, s.k),
        )
        kind = epilogue.post_ops.activation[0]
        stored = TYPE[signature.outputs[0].dtype.name]
        constants = {"FROM": stored, "TO": stored, "ADD": stored, "FACTOR": 0, "ACT": ACTIVATIONS[kind]}
        count = s.m * s.k

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            addresses = (args.inputs[x], args.packed[0], args.packed[1], residual, args.outputs[0])
            arguments = ConvGenericArguments.of(s, group, addresses, epilogue.post_ops)
            return [launch("direct", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="direct", packed=packed)

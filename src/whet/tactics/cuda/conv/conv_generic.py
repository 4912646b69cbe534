"""Convolutions and products that no tensor-core kernel takes (f32, groups, odd channel counts): one thread a value. Slow, always there."""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import anchor, constants_of, epilogue, source_place
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    HALF,
    TYPE,
    GpuKernel,
    all_static,
    blocks_of,
    ending,
    float_types,
    launch,
    machine_has,
    packed_array,
    same,
)
from whet.tactics.cuda.conv._conv import refuses
from whet.tactics.cuda.conv.conv import conv_shape, packed_bias
from whet.tactics.cuda.gemm.gemm import gemm_shape, product_reason

DIRECT_FIELDS = "<5Qq17i2f5fQ"


@tactic
class OwnDirect(Tactic):
    """Conv of two spatial axes with any groups; Gemm and MatMul with a constant matrix."""

    ops = ("Conv", "Gemm", "MatMul")
    fallback = True

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or product_reason(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or self.why_not(layer):
            return []
        head, posts = anchor(layer), epilogue(layer)
        x, form = source_place(layer), "nhwc" if head.op == "Conv" else "linear"
        found = []
        for dtype in float_types([head.inputs[0], layer.outputs[0]], (F16, BF16, F32)):
            others = [p.other for p in posts or () if p.other is not None and not layer.inputs[p.other].is_constant]
            if any(layer.inputs[i].type.rank != layer.outputs[0].type.rank for i in others):
                continue
            found.append(same(layer, {i: Operand(form, dtype) for i in (*others, x)}, Operand(form, dtype)))
        return found

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        head = anchor(layer)
        made = ending(layer, epilogue(layer), 1 if head.op == "Conv" else layer.outputs[0].type.rank - 1)
        if isinstance(made, str):
            return made
        shape = conv_shape(layer) if head.op == "Conv" else gemm_shape(layer)
        tensor_cores = machine_has(backend, "wgmma") and signature.outputs[0].dtype in HALF
        if tensor_cores and (head.op != "Conv" or head.attrs["group"] == 1) and refuses(shape, head.op == "Conv" and made.residual is None) is None:
            return "a tensor-core kernel takes this"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        head = anchor(layer)
        conv = head.op == "Conv"
        made = ending(layer, epilogue(layer), 1 if conv else layer.outputs[0].type.rank - 1)
        if isinstance(made, str):
            raise PlanRefused(made)
        s = conv_shape(layer) if conv else gemm_shape(layer)
        group = head.attrs["group"] if conv else 1
        x = source_place(layer)
        weights, own = constants_of(layer)
        turned = not conv and (head.op == "MatMul" or not head.attrs.get("transB"))

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            if not conv:
                given = (given.T if turned else given)[:, :, None, None]
            return given.transpose(2, 3, 1, 0)  # [r, s, c of a group, k]

        size = int(np.prod(static_shape(weights.shape))) * 4
        packed = (
            packed_array(f"{weights.weight.digest}|direct {turned} f32", size, filters),
            packed_bias(made, own, s.k),
        )
        kind, low, high = made.finish.activation
        stored = TYPE[signature.outputs[0].dtype.name]
        constants = {"FROM": stored, "TO": stored, "ADD": stored, "FACTOR": 0, "ACT": ACTIVATIONS[kind]}
        count = s.m * s.k

        def make(args: Args) -> list:
            residual = 0 if made.residual is None else args.inputs[made.residual]
            sizes = (s.h, s.w, s.c, s.p, s.q, s.k, s.r, s.s, *s.stride, s.pad[0], s.pad[1], *s.dilation, s.c // group, s.k // group)
            values = (args.inputs[x], *args.packed, residual, args.outputs[0], count, *sizes, made.finish.residual, low, high, *(0.0,) * 5, 0)
            return [launch("conv_generic.cu", "direct", constants, (blocks_of(count, 256), 1, 1), 256, DIRECT_FIELDS, *values)]

        return GpuKernel(layer, signature, make, implementation="own direct", packed=packed)

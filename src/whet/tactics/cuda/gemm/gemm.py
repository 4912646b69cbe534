"""Gemm and MatMul with constant weights on Hopper's tensor cores: the convolution kernel with one pixel a row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics._matrix_product import why_not_gemm
from whet.tactics.cuda._device.kernel import (
    FLOAT16_TYPES,
    GpuKernel,
    all_static,
    compile_ahead,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda.conv._conv import ConvShape, View, pack_weights, refuses
from whet.tactics.cuda.conv._conv_config import list_configs, pick_varied
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config, from_config, launch_with_epilogue, make_packed_bias, why_not_conv

MAX_CONFIGS = 16


@tactic
class Gemm(Tactic):
    """Row-major 16-bit operands; the result in the same type, or in f32 if the network's result is f32."""

    ops = ("Gemm", "MatMul")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        return why_not_gemm(layer)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if not all_static(layer) or self.why_not(layer):
            return []
        head, steps = get_root_layer(layer), find_epilogue_steps(layer)
        x = get_source_index(layer)
        signatures = []
        for dtype in list_float_types([head.inputs[0], layer.outputs[0]], FLOAT16_TYPES):
            others = [p.other for p in steps or () if p.other is not None and not layer.needs(p.other).is_constant]
            stored = {i: Operand("linear", dtype) for i in (*others, x)}
            results = [dtype] if others or layer.outputs[0].dtype != F32 else [dtype, F32]
            signatures += [make_stored_signature(layer, stored, Operand("linear", t)) for t in results]
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue = match_epilogue(layer, find_epilogue_steps(layer), layer.outputs[0].type.rank - 1)
        return epilogue if isinstance(epilogue, str) else refuses(get_gemm_shape(layer))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s = get_gemm_shape(layer)
        configs = list_configs(s.m, s.k, s.c, 1, backend.capabilities.multiprocessors)
        if signature.outputs[0].dtype == F32:
            configs = [c for c in configs if c.sk > 1 or c.direct]
        configs = pick_varied(configs, MAX_CONFIGS, each=5)
        epilogue = match_epilogue(layer, find_epilogue_steps(layer), layer.outputs[0].type.rank - 1)
        kind = signature.needs(get_source_index(layer)).dtype.name
        if not isinstance(epilogue, str):
            f32 = signature.outputs[0].dtype == F32
            compile_ahead(
                backend,
                [emit_conv_source(c, Features(activation=epilogue.post_ops.activation[0], bf16=kind == "bf16", out_f32=f32)) for c in configs],
            )
        return [as_config(c) for c in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer), layer.outputs[0].type.rank - 1)
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        head, shape, tile = get_root_layer(layer), get_gemm_shape(layer), from_config(config)
        out_f32 = signature.outputs[0].dtype == F32
        if out_f32 and tile.sk == 1 and not tile.direct:
            raise PlanRefused("f32 results need a split or direct configuration")
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        dtype = signature.needs(x).dtype
        transposed = head.op == "MatMul" or not head.attrs.get("transB")
        rows = shape.steps(tile.bk) * tile.bk

        def filters() -> np.ndarray:
            given = np.asarray(weights.array(), np.float32)
            return pack_weights((given.T if transposed else given)[:, :, None, None], tile.bk, dtype.numpy)

        packed = (
            make_packed_array(f"{weights.constant().digest}|gemm {transposed} {tile.bk} {dtype}", shape.k * rows * 2, filters),
            make_packed_bias(epilogue, own, shape.k),
        )

        def make(args: Args) -> list:
            return [launch_with_epilogue(tile, shape, View(args.inputs[x], shape.c), args, epilogue, dtype, backend, layer.name, out_f32=out_f32)]

        return GpuKernel(layer, signature, make, implementation=f"wgmma {tile}", packed=packed)


def why_not_product(layer: Layer) -> str | None:
    """Why kernels for all three cannot compute a Conv, Gemm or MatMul, or None: they need constant weights and an epilogue that is a chain."""
    head = get_root_layer(layer)
    return why_not_gemm(layer) if head.op != "Conv" else why_not_conv(layer, head)


def _count_columns(head: Layer) -> int:
    """Columns of the result."""
    return static_shape(head.outputs[0].shape)[-1]


def get_gemm_shape(layer: Layer) -> ConvShape:
    """The product as a 1x1 convolution over a row of pixels."""
    head = get_root_layer(layer)
    *rows, inner = static_shape(head.needs(0).shape)
    return ConvShape(1, 1, prod(rows), inner, _count_columns(head))

"""Quantized convolution on Hopper's tensor cores: u8 or i8 by i8, or e4m3 by itself; scales by channel, bias, residual, activation; any type out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import Epilogue, GpuKernel, compile_ahead, machine_has, make_packed_array
from whet.tactics.cuda.conv._conv import ConvShape, EightBitTypes, View, pack_weights8, refuses
from whet.tactics.cuda.conv._conv_config import SHARED_LIMIT, ConvConfig, pick_varied
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, emit_conv_source, make_conv_launch
from whet.tactics.cuda.conv._conv_tiles import list_conv_configs, why_not_config
from whet.tactics.cuda.conv.conv import as_config, from_config
from whet.tactics.cuda.quantized._quantized import (
    BYTES,
    FLOAT8,
    Factors,
    Output,
    bound_quantized_result,
    compute_factors,
    count_classes,
    fold_into_float8,
    fold_into_range,
    folds,
    folds_float8,
    get_quantized_conv_shape,
    get_weight_bytes,
    has_border,
    list_signatures,
    make_integer_scales,
    make_key,
    match_parts,
    match_quantized_epilogue,
    pack_factors,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic

MAX_CONFIGS = 30


@tactic
class QConv(QuantizedTactic):
    """Group 1, two spatial axes, input channels in sixteens; zero points at padding by a bias that depends on the pixel."""

    ops = ("Conv",)
    float8 = True

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        if parts.head.attrs["group"] != 1 or parts.head.needs(0).type.rank != 4:
            return "takes convolutions of two spatial axes and one group"
        return why_not_weighted(parts) or why_not_float8(parts, get_conv_channels(parts))

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        return list_signatures(parts, "nhwc")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        return refuses_product(parts, merge_pixel_pairs(get_quantized_conv_shape(parts)), backend)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        shape = merge_pixel_pairs(get_quantized_conv_shape(parts))
        return list_product_configs(parts, shape, signature, list_conv_configs(shape, backend.capabilities.multiprocessors, 1), backend)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        if isinstance(parts, str):
            raise PlanRefused(parts)
        w = parts.view.needs(parts.operand_indices()[1])
        return plan_product(layer, parts, get_quantized_conv_shape(parts), signature, config, backend, lambda: get_weight_bytes(w), "conv")


def get_conv_channels(parts: Parts) -> tuple[Any, Any]:
    """Input and output channels of a convolution."""
    return parts.head.needs(0).shape[1], parts.head.needs(1).shape[0]


def why_not_float8(parts: Parts, channels: tuple[Any, Any]) -> str | None:
    """The reason why a layer with float8 operands has no kernel and should stay unquantized; integers have kernels for other sizes."""
    c, k = channels
    if parts.float8 and (c % 16 or k % 8):
        return f"{c} input and {k} output channels; with float8 takes a multiple of 16 and of 8"
    return None


def merge_pixel_pairs(shape: ConvShape) -> ConvShape:
    """Two pixels as one of twice the channels, for 1x1 convolutions with rows not a multiple of 16 bytes: half of the products are with zeros."""
    if not shape.plain or shape.c % 16 != 8 or shape.m % 2 or shape.c > 64:
        return shape
    return ConvShape(1, 1, shape.m // 2, shape.c * 2, shape.k * 2)


def refuses_product(parts: Parts, shape: ConvShape, backend: Backend, axis: int = 1) -> str | None:
    """The reason why the tensor-core kernel cannot take a product of 8-bit operands, or None."""
    if not machine_has(backend, "wgmma"):
        return "needs Hopper's tensor cores (sm_90a)"
    epilogue = match_quantized_epilogue(parts, axis)
    return epilogue if isinstance(epilogue, str) else refuses(shape, epilogue.residual is None, 1)


def make_instance_types(parts: Parts, epilogue: Epilogue, signature: Signature, shape: ConvShape) -> EightBitTypes:
    """The types of an instance."""
    x = parts.source_index()
    other = "" if epilogue.residual is None else signature.needs(epilogue.residual).dtype.name
    stored = signature.outputs[0].dtype.name
    fold = folds(epilogue, stored) or folds_float8(epilogue, stored, Output.of(parts, epilogue))
    return EightBitTypes(parts.reads[x].dtype.name, stored, other, has_border(parts, shape), fold)


def can_store(tile: ConvConfig, types8: EightBitTypes, shape: ConvShape) -> bool:
    """True if a tile can store these results: shared memory takes results and residuals of one size, up to 16 bits, in rows of 16 bytes; memory any
    number of channels."""
    if shape.k % 8:
        return bool(tile.direct) and tile.sk == 1
    if tile.sk > 1 or tile.direct:
        return True
    size = types8.result_bytes
    same = types8.residual in (("", *BYTES) if size == 1 else ("", types8.result))
    fits = tile.blocks * (Features(types8=types8).shared(tile) + 1024) <= SHARED_LIMIT + 1024
    return size <= 2 and same and shape.k * size % 16 == 0 and fits


def _list_ways_to_store(tile: ConvConfig, types8: EightBitTypes, shape: ConvShape) -> list[ConvConfig]:
    """The tile, and the same storing directly: in place of one that shared memory cannot take, besides it for results of 16 bits."""
    direct = replace(tile, direct=1, sk=1, outs=1)
    if not can_store(tile, types8, shape):
        return [direct]
    return [tile, direct] if types8.result_bytes > 1 and tile.sk == 1 and not tile.direct else [tile]


def list_product_configs(
    parts: Parts, shape: ConvShape, signature: Signature, configs: list[ConvConfig], backend: Backend, axis: int = 1
) -> Sequence[Config]:
    """The first of `configs` that can run and store this; tiles that cannot go through shared memory store directly."""
    epilogue = match_quantized_epilogue(parts, axis)
    if isinstance(epilogue, str):
        return []
    types8 = make_instance_types(parts, epilogue, signature, shape)
    able = (c for c in configs if c.outs < 3 or epilogue.residual is not None)  # the third tile is for a residual in flight
    direct = (way for c in able for way in _list_ways_to_store(c, types8, shape))
    most = MAX_CONFIGS + (6 if epilogue.residual is not None else 0)
    good = pick_varied(list(dict.fromkeys(c for c in direct if c.valid() and why_not_config(c, shape) is None)), most)
    kind, odd = epilogue.post_ops.activation[0], shape.k % 8 != 0
    compile_ahead(backend, [emit_conv_source(c, Features(not shape.plain and not c.halo, kind, odd=odd, types8=types8)) for c in good])
    return [as_config(c) for c in good]


def plan_product(
    layer: Layer,
    parts: Parts,
    shape: ConvShape,
    signature: Signature,
    config: Config,
    backend: Backend,
    array: Callable[[], np.ndarray],
    name: str,
    axis: int = 1,
) -> GpuKernel:
    """The kernel of a Conv, Gemm or MatMul; `array` gives its integer weights as [k, c, r, s]."""
    epilogue, tile, single = match_quantized_epilogue(parts, axis), from_config(config), shape
    shape = merge_pixel_pairs(shape)
    reason = epilogue if isinstance(epilogue, str) else refuses(shape, epilogue.residual is None, 1) or why_not_config(tile, shape)
    if reason or isinstance(epilogue, str):
        raise PlanRefused(str(reason))
    types8 = make_instance_types(parts, epilogue, signature, shape)
    if not can_store(tile, types8, shape):
        raise PlanRefused(f"{tile} cannot store {types8.result} with {shape.k} channels and this residual")
    x, w, b = parts.operand_indices()
    bias = None if b is None else parts.view.inputs[b]
    classes, key = count_classes(shape) if types8.border else 1, make_key(parts, epilogue)
    digest = parts.view.needs(w).constant().digest
    rows = shape.steps(tile.bk) * tile.bk

    def make_filters() -> np.ndarray:
        given = array()
        return given if shape is single else np.kron(np.eye(2, dtype=np.int8), given[:, :, 0, 0])[:, :, None, None]

    def make_factors() -> Factors:
        found = compute_factors(parts, epilogue, array(), single, bias)
        found = found if shape is single else Factors(np.tile(found.factor, 2), np.tile(found.bias, (1, 2)), found.classes)
        return found.times(per, shift)

    out, per, shift = Output.of(parts, epilogue), 1.0, 0.0
    post_ops = epilogue.post_ops
    if types8.fold and types8.result == FLOAT8:
        per, out, post_ops = fold_into_float8(out, epilogue)
    elif types8.fold:
        per, shift, out, post_ops = fold_into_range(out, epilogue, types8.result)
    packed = (
        make_packed_array(
            f"{digest}|{name} 8 bits {tile.bk} {shape is single}", -(-shape.k // 32) * 32 * rows, lambda: pack_weights8(make_filters(), tile.bk)
        ),
        *pack_factors(f"{key}|{name} {shape} {per} {shift}", shape, classes, types8.border, make_factors),
    )

    def make(args: Args) -> list:
        residual = None if epilogue.residual is None else View(args.inputs[epilogue.residual], shape.k)
        biases, scales = make_integer_scales(out, args.packed[1], args.packed[2], classes, shape.k)
        source = View(args.inputs[x], shape.c)
        return [
            make_conv_launch(
                tile,
                ConvProblem(
                    shape=shape,
                    input=source,
                    weights=args.packed[0],
                    bias=biases,
                    output=View(args.outputs[0], shape.k),
                    residual=residual,
                    post_ops=post_ops,
                    types8=types8,
                    scales=scales,
                ),
                multiprocessors=backend.capabilities.multiprocessors,
                label=layer.name,
            )
        ]

    rtol = bound_quantized_result(types8.source == FLOAT8, single.r * single.s * single.c, epilogue.post_ops.activation, types8.result)
    return GpuKernel(layer, signature, make, implementation=f"wgmma {types8.source} {tile}", packed=packed, rtol=rtol)

"""Quantized depthwise convolution, channels last: the depthwise kernels with integers in and out, scales in the weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    RTOL,
    Epilogue,
    GpuKernel,
    compile_ahead,
    count_blocks,
    launch,
    machine_has,
    make_packed_array,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES, ConvShape, count_bias_floats
from whet.tactics.cuda.depthwise._depthwise_tile import list_tiles, tile_launch
from whet.tactics.cuda.depthwise._depthwise_tile import make_constants as tile_constants
from whet.tactics.cuda.depthwise._depthwise_tile import refuses as no_tile
from whet.tactics.cuda.depthwise.depthwise import DepthwiseArguments, tile_config, tile_from
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Output,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    list_signatures,
    make_key,
    match_parts,
    match_quantized_epilogue,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic


@tactic
class QDepthwise(QuantizedTactic):
    """As many groups as channels, one filter each; kernels up to 7 x 7, no dilation, no residual."""

    ops = ("Conv",)

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        x, w = parts.head.needs(0), parts.head.needs(1)
        if x.type.rank != 4 or w.shape[1] != 1 or parts.head.attrs["group"] != w.shape[0] or w.shape[0] != x.shape[1]:
            return "takes depthwise convolutions of two spatial axes"
        return why_not_weighted(parts)

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        return list_signatures(parts, "nhwc")

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str):
            return str(epilogue)
        s = get_quantized_conv_shape(parts)
        if epilogue.residual is not None or s.dilation != (1, 1):
            return "takes no residual and no dilation"
        if s.c % 8 or s.m * s.c // 8 >= 2**31:
            return f"{s.c} channels are not a multiple of 8, or there are more than 2**31 groups of eight values"
        return "takes filters up to 7 x 7" if max(s.r, s.s) > 7 else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        s, epilogue = get_quantized_conv_shape(parts), match_quantized_epilogue(parts)
        assert isinstance(epilogue, Epilogue)
        configs: list[Config] = []
        if _can_tile(parts, s, signature) and machine_has(backend, "tma") and s.m * s.c >= 8192 * backend.capabilities.multiprocessors:
            tiles, (reads, stores) = list_tiles(s, 1, backend.capabilities.multiprocessors), _get_types(parts, signature)
            fold = folds(epilogue, signature.outputs[0].dtype.name)
            compile_ahead(
                backend,
                [emit_kernel_source("depthwise_tile.cu", tile_constants(s, t, reads, stores, epilogue.post_ops.activation[0], fold)) for t in tiles],
            )
            configs = [tile_config(t) for t in tiles]
        for wide, tall in ((1, 1), (2, 1), (4, 1), (2, 4), (2, 8)):
            threads = s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8)
            large = s.r * s.s > 9 and (tall > 1 or wide > 2)  # would not fit the registers
            if not large and (tall == 1 or threads >= 256 * backend.capabilities.multiprocessors):
                configs.append((("wide", wide), ("tall", tall)))
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str):
            raise PlanRefused(str(epilogue))
        s, (reads, stores), given = get_quantized_conv_shape(parts), _get_types(parts, signature), dict(config)
        x = parts.source_index()
        zero = parts.reads[x].zero
        out, per, shift, stored = Output.of(parts, epilogue), 1.0, 0.0, signature.outputs[0].dtype.name
        fold = not int(given.get("tall", 0)) and folds(epilogue, stored)
        post_ops = epilogue.post_ops
        if fold:
            per, shift, out, post_ops = fold_into_range(out, epilogue, stored)
        key = f"{make_key(parts, epilogue)}|depthwise 8 bits {per} {shift}"
        packed = (
            make_packed_array(f"{key} weights", s.r * s.s * s.c * 4, lambda: (_scale_weights(parts, s) * per).astype(np.float32).T),
            make_packed_array(
                f"{key} bias",
                count_bias_floats(s.c) * 4,
                lambda: (_compute_bias(parts, epilogue, s).astype(np.float64) * per + shift).astype(np.float32),
            ),
        )
        kind, low, high = post_ops.activation
        if not int(given.get("tall", 0)):
            if not _can_tile(parts, s, signature):
                raise PlanRefused("tiles pad with the integer 0 and store integers or 16 bits")
            tile = tile_from(config, s, 1)
            text = tile_constants(s, tile, reads, stores, kind, fold)

            def make_tile_launch(args: Args) -> list:
                addresses = (args.inputs[x], args.packed[0], args.packed[1], args.outputs[0])
                blocks = backend.capabilities.multiprocessors
                return [tile_launch(s, tile, text, addresses, (low, high), (out.per_step, out.zero), blocks, layer.name)]

            return _make_kernel(layer, signature, make_tile_launch, f"depthwise tile {tile}", packed)
        wide, tall = int(given["wide"]), int(given["tall"])
        constants = {"FROM": reads, "TO": stores, "R": s.r, "S": s.s, "STRIDE": s.stride[1], "WIDE": wide, "TALL": tall, "ACT": ACTIVATIONS[kind]}
        grid = (count_blocks(s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8), 128), 1, 1)
        fill = (zero & 0xFF) * 0x01010101

        def make(args: Args) -> list:
            addresses = (args.inputs[x], args.packed[0], args.packed[1], 0, args.outputs[0])
            sizes = (s.n, s.h, s.w, s.c, s.p, s.q, s.stride[0], s.pad[0], s.pad[1], *s.dilation, 0)
            arguments = DepthwiseArguments(*addresses, *sizes, act=(low, high), fill=fill, per_step=out.per_step, zero=out.zero)
            return [launch("depthwise", arguments, constants, grid, 128)]

        return _make_kernel(layer, signature, make, f"depthwise {tall}x{wide}", packed)


def _make_kernel(layer: Layer, signature: Signature, make: Any, name: str, packed: Any) -> GpuKernel:
    stored = signature.outputs[0].dtype.name
    return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=0.0 if stored in INT8_TYPES else RTOL[stored])


def _get_types(parts: Parts, signature: Signature) -> tuple[int, int]:
    x = parts.source_index()
    return TYPES[parts.reads[x].dtype.name], TYPES[signature.outputs[0].dtype.name]


def _can_tile(parts: Parts, s: ConvShape, signature: Signature) -> bool:
    """Bulk copies fill padding with the integer 0."""
    x = parts.source_index()
    whole = not any(s.pad)
    return (parts.reads[x].zero == 0 or whole) and not no_tile(s, 1) and signature.outputs[0].dtype.name != "f32"


def _scale_weights(parts: Parts, s: ConvShape) -> np.ndarray:
    """Weights [k, taps] as real values of an input step."""
    x, w, _ = parts.operand_indices()
    integers = np.asarray(parts.view.needs(w).array(), np.float64).reshape(s.c, s.r * s.s)
    factor = np.broadcast_to(parts.reads[w].scale.astype(np.float64) * parts.reads[x].number, (s.c,))
    return integers * factor[:, None]


def _compute_bias(parts: Parts, epilogue: Epilogue, s: ConvShape) -> np.ndarray:
    """Biases that subtract the zero point: padding is read as the zero point."""
    x, _, b = parts.operand_indices()
    out = np.zeros(count_bias_floats(s.c), np.float32)
    own = epilogue.bias(None if b is None else parts.view.inputs[b], s.c).astype(np.float64)
    out[: s.c] = own - parts.reads[x].zero * _scale_weights(parts, s).sum(axis=1)
    return out

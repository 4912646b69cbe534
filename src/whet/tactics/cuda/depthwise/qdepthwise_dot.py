"""Quantized depthwise convolution of large images by dot products of four bytes: integer accumulators, a factor per channel, integers out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.arguments import (
    Arguments,
    ConstFloatPointer,
    ConstIntPointer,
    Int32,
    TensorMap,
)
from whet.tactics.cuda._device.kernel import Epilogue, GpuKernel, compile_ahead, launch, machine_has, make_packed_array
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES, ConvShape, count_bias_floats
from whet.tactics.cuda.depthwise._depthwise_tile import Tile, TileFields, list_tiles, make_input_map, place_tiles
from whet.tactics.cuda.depthwise._depthwise_tile import make_constants as tile_constants
from whet.tactics.cuda.depthwise._depthwise_tile import refuses as no_tile
from whet.tactics.cuda.depthwise.depthwise import tile_config, tile_from
from whet.tactics.cuda.depthwise.qdepthwise import QDepthwise
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    Output,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    get_weight_bytes,
    make_key,
    match_parts,
    match_quantized_epilogue,
)

_MANY = 8192  # results a multiprocessor: of fewer, latency counts rather than instructions, and few tiles are tried
_REGISTERS = 224


@dataclass(frozen=True)
class DepthwiseDotArguments(Arguments, kernel="depthwise_dot.cu"):
    input: TensorMap
    weights: ConstIntPointer  # [R][KINDS][TAKEN][c]: words of four taps
    factors: ConstFloatPointer  # [2][pitch]: biases, and the real value of a step of each channel's sum
    tile: TileFields
    pitch: Int32


@tactic
class QDepthwiseDot(QDepthwise):
    """As qdepthwise, with filters up to 5 x 5, padded inputs without zero point, and a multiple of 16 channels."""

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        reason = super().why_not_parts(layer, parts)
        if reason or parts.stores is None or parts.stores.dtype.name not in INT8_TYPES:
            return reason or "stores integers"
        x = parts.source_index()
        padded = any(parts.head.attrs.get("pads") or ())
        return "pads with the integer 0, which is not this input's zero point" if parts.reads[x].zero and padded else None

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        reason = super().refuses(layer, signature, backend)
        if reason or not machine_has(backend, "tma"):
            return reason or "needs Hopper's copy engine (sm_90a)"
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        s = get_quantized_conv_shape(parts)
        if s.c % 16:
            return f"{s.c} channels; takes a multiple of 16"
        return no_tile(s, 1)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        s, epilogue = get_quantized_conv_shape(parts), match_quantized_epilogue(parts)
        tiles = [t for t in list_tiles(s, 1, backend.capabilities.multiprocessors) if _estimate_registers(s, t) <= _REGISTERS]
        tiles = tiles if s.m * s.c >= _MANY * backend.capabilities.multiprocessors else tiles[:3]
        if not isinstance(epilogue, str):
            compile_ahead(backend, [emit_kernel_source("depthwise_dot.cu", make_macros(parts, epilogue, s, t, signature)) for t in tiles])
        return [tile_config(t) for t in tiles]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str) or self.refuses(layer, signature, backend):
            raise PlanRefused(str(epilogue if isinstance(epilogue, str) else self.refuses(layer, signature, backend)))
        s, stored = get_quantized_conv_shape(parts), signature.outputs[0].dtype.name
        tile, x = tile_from(config, s, 1), parts.source_index()
        out, per, shift, post_ops = Output.of(parts, epilogue), 1.0, 0.0, epilogue.post_ops
        if folds(epilogue, stored):
            per, shift, out, post_ops = fold_into_range(out, epilogue, stored)
        constants, pitch = make_macros(parts, epilogue, s, tile, signature), count_bias_floats(s.c)
        kinds, taken = count_words(s, tile)
        w = parts.view.needs(parts.operand_indices()[1])
        key = f"{make_key(parts, epilogue)}|depthwise dot"
        packed = (
            make_packed_array(f"{key} {kinds} {taken}", s.r * kinds * taken * s.c * 4, lambda: pack_taps(get_weight_bytes(w), kinds, taken)),
            make_packed_array(f"{key} {per} {shift}", 2 * pitch * 4, lambda: _compute_factors(parts, epilogue, s, per, shift)),
        )

        def make(args: Args) -> list:
            multiprocessors = backend.capabilities.multiprocessors
            fields, grid = place_tiles(s, tile, args.outputs[0], post_ops.activation[1:], (out.per_step, out.zero), multiprocessors)
            arguments = DepthwiseDotArguments(make_input_map(args.inputs[x], "u8", s, tile, 1), args.packed[0], args.packed[1], fields, pitch)
            return [launch("depthwise_dot", arguments, constants, grid, tile.threads, shared=tile.shared(s, 1), label=layer.name)]

        return GpuKernel(layer, signature, make, implementation=f"depthwise dot {tile}", packed=packed, rtol=0.0)


def count_words(s: ConvShape, tile: Tile) -> tuple[int, int]:
    """Kinds of outputs (at even pixels, at odd ones), and words of four taps in a filter row; mirrors depthwise_dot.cu."""
    kinds = 2 if s.stride[1] % 2 and tile.wide > 1 else 1
    return kinds, (s.s + kinds - 1 + 3) // 4


def pack_taps(weights: np.ndarray, kinds: int, taps: int) -> np.ndarray:
    """Filters [c, 1, r, s] of i8 as words [r][kinds][taken][c] of four taps, those of the second kind moved by one."""
    c, _, r, s = weights.shape
    out = np.zeros((r, kinds, taps * 4, c), np.int8)
    for k in range(kinds):
        out[:, k, k : k + s] = weights[:, 0].transpose(1, 2, 0)
    return np.ascontiguousarray(out.reshape(r, kinds, taps, 4, c).transpose(0, 1, 2, 4, 3))


def _compute_factors(parts: Parts, epilogue: Epilogue, s: ConvShape, per: float, shift: float) -> np.ndarray:
    """[2][pitch]: biases that subtract the zero point, and the real value of a step; with FOLD both as fractions of the range."""
    x, w, b = parts.operand_indices()
    reads, weights = parts.reads[x], get_weight_bytes(parts.view.needs(w)).astype(np.float64)
    factor = np.broadcast_to(parts.reads[w].scale.astype(np.float64) * reads.number, (s.c,))
    own = epilogue.bias(None if b is None else parts.view.inputs[b], s.c).astype(np.float64)
    out = np.zeros((2, count_bias_floats(s.c)), np.float32)
    out[0, : s.c] = (own - reads.zero * factor * weights.sum(axis=(1, 2, 3))) * per + shift
    out[1, : s.c] = factor * per
    return out


def make_macros(parts: Parts, epilogue: Epilogue, s: ConvShape, tile: Tile, signature: Signature) -> dict[str, int]:
    """The macros of an instance."""
    x, stored = parts.source_index(), signature.outputs[0].dtype.name
    reads = TYPES[parts.reads[x].dtype.name]
    return tile_constants(s, tile, reads, TYPES[stored], epilogue.post_ops.activation[0], folds(epilogue, stored))


def _estimate_registers(s: ConvShape, tile: Tile) -> int:
    """An estimate of the registers of a thread: taps, accumulators, words of a row."""
    kinds, taken = count_words(s, tile)
    words = (tile.wide - 1) * s.stride[1] // 2 + 2 * taken - 1
    return 4 * (s.r * kinds * taken + -(-s.r // s.stride[0]) * tile.wide + words) + 40

"""Stem convolutions of f32 images in TF32 that read the image directly (stem_tf32.cu); `--noTF32` forbids it.

Separate from `conv_tf32` because that one reads a copy of the image with padded channels: 47.8 us instead of 180 (batch 1: 9.1 instead of 27.8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer, Tensor
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, FloatPointer, Int32, TensorMap
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    Epilogue,
    GpuKernel,
    all_static,
    compile_ahead,
    launch,
    list_float_types,
    machine_has,
    make_packed_array,
    make_stored_signature,
    match_epilogue,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv._conv_config import REGISTERS, SHARED_LIMIT
from whet.tactics.cuda.conv._tf32 import cut_to_tf32, permute_by_16, read_config_fields
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.conv.conv_tf32 import ConvTf32
from whet.tactics.cuda.stem.stem_as_channels import FirstLayer

_TILES = tuple((wgs * mine, wgs) for wgs in (1, 2) for mine in (1, 2, 3, 4, 5, 6, 8))  # rows of results of a block, warpgroups
_MOST = 12  # configurations


@dataclass(frozen=True)
class StemTf32Arguments(Arguments, kernel="stem_tf32.cu"):
    weights: TensorMap  # [BN][CHUNKS * 32], boxes of 32 x BN
    input: TensorMap  # [n][C][h][w], boxes of COLUMNS x ROWS x C x 1
    out: FloatPointer  # [n][p][q][k]
    p: Int32
    q: Int32
    k: Int32
    top: Int32  # rows and columns of padding before the tile of the first block
    left: Int32
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32
    act: ActivationParameters


@dataclass(frozen=True, order=True)
class StemTile:
    """One instance of stem_tf32.cu: rows of results of a block, its warpgroups, resident blocks."""

    th: int
    wgs: int
    blocks: int

    @property
    def config(self) -> Config:
        """The engine's record of the configuration."""
        return (("th", self.th), ("wgs", self.wgs), ("blocks", self.blocks), ("math", "tf32"))

    @staticmethod
    def of(config: Config) -> StemTile:
        """The instance that an engine names."""
        return StemTile(**read_config_fields(config))

    def constants(self, s: ConvShape, post_ops: PostOps) -> dict[str, int]:
        """The macros of the instance."""
        activation = ACTIVATIONS[post_ops.activation[0]]
        own = {"TH": self.th, "WGS": self.wgs, "BLOCKS": self.blocks, "BN": count_padded_channels(s), "ACT": activation, "TERMS": 1}
        return {**own, "C": s.c, "R": s.r, "S": s.s, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "LEAD": count_leading_pixels(s)}

    def patch(self, s: ConvShape) -> tuple[int, int]:
        """Rows and columns of the image in a block's shared memory; mirrors stem_tf32.cu."""
        return (self.th - 1) * s.stride[0] + s.r, -(-(count_leading_pixels(s) + 63 * s.stride[1] + s.s) // 4) * 4

    def shared(self, s: ConvShape) -> int:
        """Bytes of shared memory; mirrors stem_tf32.cu."""
        tall, wide = self.patch(s)
        return 1024 + count_row_elements(s) * count_padded_channels(s) * 4 + -(-tall * wide // 8) * 128 + tall * wide * s.c * 4 + 16

    def why_not(self, s: ConvShape) -> str | None:
        """Why a multiprocessor cannot hold it, or None."""
        registers = count_padded_channels(s) * min(2, self.th // self.wgs) // 2 + 48  # rows of accumulators, addresses
        large = max(self.patch(s)) > 256 or registers * self.blocks * self.wgs * 128 > REGISTERS
        if large or self.blocks * (self.shared(s) + 1024) > SHARED_LIMIT + 1024:
            return f"a multiprocessor cannot hold {self.blocks} blocks of {self}"
        return None

    def estimate_us(self, s: ConvShape, multiprocessors: int) -> float:
        """A rough time in us on an H200, which only orders candidates. The last wave of blocks may be nearly empty."""
        tiles = s.n * -(-s.p // self.th) * -(-s.q // 64)
        turns = -(-tiles // (multiprocessors * self.blocks))
        tall, wide = self.patch(s)
        work = self.th * count_padded_channels(s) / 32 * 0.22 + tall * wide * s.c * 4 / 60e3  # us: products and epilogue, transfer from the L2 cache
        alone = 1.8 + 0.3 * self.th / self.wgs  # latency of a tile, mostly hidden by other blocks
        return turns * (0.3 + max(alone, self.blocks * work) + 0.5 * alone / self.blocks)

    def __str__(self) -> str:
        return f"64x{self.th} w{self.wgs} b{self.blocks}"


@tactic
class StemTf32(FirstLayer):
    """Up to 3 input channels, strides of 1 or 2, rows of a multiple of 4 pixels, filters up to 11 x 11, a multiple of 4 up to 128 output channels."""

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        if F32 not in list_float_types([get_root_layer(layer).inputs[0], layer.outputs[0]], (F32,)):
            return []
        return [make_stored_signature(layer, {get_source_index(layer): Operand("linear", F32)}, Operand("nhwc", F32))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if epilogue.residual is not None:
            return "takes no residual"
        if s.c > 3 or s.k > 128 or s.k % 4 or max(s.r, s.s) > 11 or s.r * s.s < 3 or s.w % 4 or s.stride[1] > 2 or s.dilation != (1, 1):
            sizes = f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}, stride {s.stride[1]}, rows of {s.w} pixels"
            return f"{sizes}; takes at most 3, a multiple of 4 up to 128, 3 taps to 11 x 11, 1 or 2, a multiple of 4, and no dilation"
        return None if any(t.why_not(s) is None for t in _list_tiles()) else "the weights and an image tile exceed shared memory"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        s, epilogue = get_conv_shape(layer), match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(epilogue, str):
            return []
        able = [t for t in _list_tiles() if t.why_not(s) is None]
        configs = sorted(able, key=lambda t: (t.estimate_us(s, backend.capabilities.multiprocessors), t))[:_MOST]
        compile_ahead(backend, [emit_kernel_source("stem_tf32.cu", t.constants(s, epilogue.post_ops)) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), StemTile.of(config)
        if isinstance(epilogue, str) or tile.why_not(s):
            raise PlanRefused(epilogue if isinstance(epilogue, str) else f"a multiprocessor cannot hold {tile}")
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        assert weights is not None
        constants = tile.constants(s, epilogue.post_ops)
        tiles_h, tiles_w = -(-s.p // tile.th), -(-s.q // 64)
        tiles = s.n * tiles_h * tiles_w

        def make(args: Args) -> list:
            row, channels = count_row_elements(s), count_padded_channels(s)
            filters = tensormap.make_tiled_map(args.packed[0], "f32", (row, channels), (row * 4,), (32, channels))
            tall, wide = tile.patch(s)
            lines = (s.w * 4, s.w * s.h * 4, s.w * s.h * s.c * 4)
            image = tensormap.make_tiled_map(args.inputs[x], "f32", (s.w, s.h, s.c, s.n), lines, (wide, tall, s.c, 1), plain=True)
            sizes = (s.p, s.q, s.k, s.pad[0], s.pad[1] + count_leading_pixels(s), tiles_h, tiles_w, tiles)
            arguments = StemTf32Arguments(filters, image, args.outputs[0], *sizes, act=epilogue.post_ops.activation[1:])
            grid = (min(tiles, backend.capabilities.multiprocessors * tile.blocks), 1, 1)
            return [launch("stem_tf32", arguments, constants, grid, tile.wgs * 128, shared=tile.shared(s), label=layer.name)]

        packed = (pack_stem_filters(s, weights, epilogue, own),)
        return GpuKernel(layer, signature, make, implementation=f"first wgmma tf32 {tile}", packed=packed, rtol=ConvTf32.rtol)


def _list_tiles() -> list[StemTile]:
    return [StemTile(th, wgs, blocks) for th, wgs in _TILES for blocks in (6, 5, 4, 3, 2, 1)]


def pack_stem_filters(s: ConvShape, weights: Tensor, epilogue: Epilogue, own: Tensor | None) -> Packed:
    """Filters as rows of taps of four channels in stem_tf32.cu's order, permuted in 16s; the fourth channel of the first three taps is the bias."""
    order = list_taps(s)

    def make_filters() -> np.ndarray:
        given = np.asarray(weights.array(), np.float32).reshape(s.k, s.c, -1)  # [k, c, taps]
        side = np.zeros((count_padded_channels(s), -(-len(order) // 2) * 2, 4), np.float32)
        side[: s.k, : len(order), : s.c] = given[:, :, order].transpose(0, 2, 1)
        left = epilogue.bias(own, s.k)
        for tap in range(3):  # in parts: their sum has the bits of a float
            part = cut_to_tf32(left)
            side[: s.k, tap, 3] = part
            left = np.where(np.isfinite(left), left - np.where(np.isfinite(part), part, 0), 0).astype(np.float32)
        if len(order) % 2:  # the last tap is read twice: half its weights each keep an infinite pixel infinite
            side[:, -2:] = side[:, -2:-1] / 2
        out = np.zeros((count_padded_channels(s), count_row_elements(s)), np.float32)
        out[:, : side[0].size] = side.reshape(count_padded_channels(s), -1)
        return permute_by_16(cut_to_tf32(out))

    bias = "" if own is None else own.constant().digest
    sizes = f"{count_leading_pixels(s)} {s.stride[1]} {count_row_elements(s)} {count_padded_channels(s)}"
    key = f"{weights.constant().digest} {bias} {epilogue.key}|first tf32 {sizes}"
    return make_packed_array(key, count_padded_channels(s) * count_row_elements(s) * 4, make_filters)


def list_taps(s: ConvShape) -> list[int]:
    """Taps of a filter in the order of K: first those of phase 0 (column modulo stride) row by row, then those of phase 1."""
    phases = [[x for x in range(s.s) if (count_leading_pixels(s) + x) % s.stride[1] == phase] for phase in range(s.stride[1])]
    return [y * s.s + x for across in phases for y in range(s.r) for x in across]


def count_leading_pixels(s: ConvShape) -> int:
    """Pixels from the tile's first column, a multiple of four (16 bytes), to the first window."""
    return -s.pad[1] % 4


def count_padded_channels(s: ConvShape) -> int:
    """Output channels, padded to a multiple of 16."""
    return -(-s.k // 16) * 16


def count_row_elements(s: ConvShape) -> int:
    """Elements of a packed filter: a multiple of 32."""
    return -(-s.r * s.s // 8) * 32

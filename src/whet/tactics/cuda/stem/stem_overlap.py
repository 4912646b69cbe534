"""Stem convolutions of stride 2 that read the image directly; the tensor cores read overlapping windows from shared memory (stem_overlap.cu).

Separate from stem.cu because that kernel is bound by the instructions that gather its fragments: 27.8 us instead of 40 for YOLOv5s at batch 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer, Tensor
from whet.network.types import F32, DType
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstPointer, Int32, Pointer, TensorMap
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    RTOL,
    Epilogue,
    GpuKernel,
    compile_ahead,
    launch,
    machine_has,
    make_packed_array,
    match_epilogue,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, permute_rows
from whet.tactics.cuda.conv._conv_config import REGISTERS, SHARED_LIMIT
from whet.tactics.cuda.conv._few_channel import is_halved
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.stem.stem_as_channels import FirstLayer

_TILES = tuple((wgs * mine, wgs) for wgs in (1, 2) for mine in (2, 3, 4, 5, 6, 7, 8))  # rows of results of a block, warpgroups
_MOST = 12  # result rows of a block, warpgroups


@dataclass(frozen=True)
class StemOverlapArguments(Arguments, kernel="stem_overlap.cu"):
    weights: TensorMap  # [k][CHUNKS * 64], boxes of 64 x BN
    input: ConstPointer  # [n][C][h][w], w a multiple of 4
    out: Pointer  # [n][p][q][k]
    h: Int32
    w: Int32
    p: Int32
    q: Int32
    k: Int32
    top: Int32  # rows and columns of padding before the image, `left` a multiple of 4
    left: Int32
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32
    act: ActivationParameters


@dataclass(frozen=True, order=True)
class OverlapTile:
    """One instance of stem_overlap.cu: rows of results of a block, its warpgroups, resident blocks."""

    th: int
    wgs: int
    blocks: int

    @property
    def config(self) -> Config:
        """The engine's record of the configuration."""
        return (("th", self.th), ("wgs", self.wgs), ("blocks", self.blocks))

    def constants(self, s: ConvShape, post_ops: PostOps, source: DType, dtype: DType) -> dict[str, int]:
        """The macros of the instance."""
        kind = ACTIVATIONS[post_ops.activation[0]]
        own = {"TH": self.th, "WGS": self.wgs, "BLOCKS": self.blocks}
        shape = {
            "C": s.c,
            "R": s.r,
            "TX": count_row_cells(s),
            "STRIDE_H": s.stride[0],
            "LEAD": count_leading_places(s),
            "BN": count_padded_channels(s),
        }
        return {**own, **shape, "FROM": int(source != F32), "ACT": kind, "HALVED": int(is_halved(post_ops)), "BF16": int(dtype.name == "bf16")}

    def shared(self, s: ConvShape) -> int:
        """Bytes of shared memory; mirrors stem_overlap.cu."""
        wide = -(-(count_leading_places(s) + 63 + count_row_cells(s)) // 2) * 2
        return 1024 + count_row_elements(s) * count_padded_channels(s) * 2 + ((self.th - 1) * s.stride[0] + s.r) * wide * 16 + 8

    def why_not(self, s: ConvShape, source: DType) -> str | None:
        """Why a multiprocessor cannot hold it, or None."""
        units = -(-((self.th - 1) * s.stride[0] + s.r) * (-(-(count_leading_places(s) + 63 + count_row_cells(s)) // 2)) // (128 * self.wgs))
        registers = count_padded_channels(s) + units * s.c * (4 if source == F32 else 2) + 37  # two rows of accumulators, pixels in flight, addresses
        if registers * self.blocks * self.wgs * 128 > REGISTERS or registers > 240 or self.blocks * (self.shared(s) + 1024) > SHARED_LIMIT + 1024:
            return f"a multiprocessor cannot hold {self.blocks} blocks of {self}"
        return None

    def estimate_us(self, s: ConvShape, multiprocessors: int) -> float:
        """A rough time in us on an H200, which only orders candidates. The last wave of blocks may be nearly empty."""
        tiles = s.n * -(-s.p // self.th) * -(-s.q // 64)
        turns = -(-tiles // (multiprocessors * self.blocks))
        work = self.th * count_padded_channels(s) / 32 * 0.1 + ((self.th - 1) * s.stride[0] + s.r) * s.c * 0.01
        alone = 1.5 + 0.15 * self.th / self.wgs  # latency of a tile, mostly hidden by other blocks
        return turns * (0.3 + max(alone, self.blocks * work) + 0.5 * alone / self.blocks)

    def __str__(self) -> str:
        return f"64x{self.th} w{self.wgs} b{self.blocks}"


@tactic
class StemOverlap(FirstLayer):
    """Up to 3 input channels, stride 2 along rows, image rows of a multiple of 4 pixels, filters up to 8 x 8, up to 128 output channels."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        image = signature.inputs[get_source_index(layer)]
        if isinstance(epilogue, str):
            return epilogue
        if epilogue.residual is not None or image is None or image.format != "linear" or image.dtype not in (F32, signature.outputs[0].dtype):
            return "takes images with channels first, in f32 or the type of the result, and no residual"
        if s.c > 3 or s.k > 128 or s.k % 8 or s.s > 8 or s.r > 8 or s.w % 4 or s.stride[1] != 2 or s.dilation != (1, 1):
            sizes = f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}, stride {s.stride[1]}, rows of {s.w} pixels"
            return f"{sizes}; takes at most 3, a multiple of 8 up to 128, at most 8 x 8, 2, a multiple of 4"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        s, image = get_conv_shape(layer), signature.inputs[get_source_index(layer)]
        epilogue, dtype = match_epilogue(layer, find_epilogue_steps(layer)), signature.outputs[0].dtype
        if image is None or isinstance(epilogue, str):
            return []
        every = [OverlapTile(th, wgs, blocks) for th, wgs in _TILES for blocks in (6, 5, 4, 3, 2, 1)]
        able = [t for t in every if t.why_not(s, image.dtype) is None]
        configs = sorted(able, key=lambda t: (t.estimate_us(s, backend.capabilities.multiprocessors), t))[:_MOST]
        compile_ahead(backend, [emit_kernel_source("stem_overlap.cu", t.constants(s, epilogue.post_ops, image.dtype, dtype)) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), OverlapTile(**{k: int(v) for k, v in config})
        x, dtype = get_source_index(layer), signature.outputs[0].dtype
        image = signature.inputs[x]
        if isinstance(epilogue, str) or image is None or tile.why_not(s, image.dtype):
            raise PlanRefused(epilogue if isinstance(epilogue, str) else f"a multiprocessor cannot hold {tile}")
        constants = tile.constants(s, epilogue.post_ops, image.dtype, dtype)
        tiles_h, tiles_w = -(-s.p // tile.th), -(-s.q // 64)
        tiles = s.n * tiles_h * tiles_w

        def make(args: Args) -> list:
            row, channels = count_row_elements(s), count_padded_channels(s)
            filters = tensormap.make_tiled_map(args.packed[0], dtype.name, (row, channels), (row * 2,), (64, channels))
            sizes = (s.h, s.w, s.p, s.q, s.k, s.pad[0], s.pad[1] + s.pad[1] % 2 + 2 * count_leading_places(s), tiles_h, tiles_w, tiles)
            arguments = StemOverlapArguments(filters, args.inputs[x], args.outputs[0], *sizes, act=epilogue.post_ops.activation[1:])
            grid = (min(tiles, backend.capabilities.multiprocessors * tile.blocks), 1, 1)
            return [launch("stem_overlap", arguments, constants, grid, tile.wgs * 128, shared=tile.shared(s), label=layer.name)]

        weights, own = get_weight_and_bias(layer)
        packed = (pack_filters(s, weights, own, epilogue, dtype),)
        rtol = RTOL[dtype.name] * (1.5 if image.dtype == F32 else 1)  # the image is rounded as well
        return GpuKernel(layer, signature, make, implementation=f"first places {tile}", packed=packed, rtol=rtol)


def pack_filters(s: ConvShape, weights: Tensor, own: Tensor | None, epilogue: Epilogue, dtype: DType) -> Packed:
    """Filters as stem_overlap.cu reads them: [columns][row of taps of four channels], rows permuted, the bias in the fourth channel of two taps."""

    def make_filters() -> np.ndarray:
        odd, taps, scale = s.pad[1] % 2, 2 * count_row_cells(s), np.float32(0.5 if is_halved(epilogue.post_ops) else 1)
        side = np.zeros((count_padded_channels(s), s.r, taps, 4), dtype.numpy)
        given = np.asarray(weights.array(), np.float32) * scale  # [k, c, r, s]
        side[: s.k, :, odd : odd + s.s, : s.c] = given.transpose(0, 2, 3, 1)
        bias = epilogue.bias(own, s.k) * scale
        side[: s.k, 0, 0, 3] = bias
        side[: s.k, 0, 1, 3] = bias - side[: s.k, 0, 0, 3].astype(np.float32)
        out = np.zeros((count_padded_channels(s), count_row_elements(s)), dtype.numpy)
        out[:, : side[0].size] = side.reshape(count_padded_channels(s), -1)
        return permute_rows(out)

    bias = "" if own is None else own.constant().digest
    key = f"{weights.constant().digest} {bias} {epilogue.key}|first places {s.pad[1] % 2} {count_row_elements(s)} {dtype}"
    return make_packed_array(f"{key} {is_halved(epilogue.post_ops)}", count_padded_channels(s) * count_row_elements(s) * 2, make_filters)


def count_row_cells(s: ConvShape) -> int:
    """Cells of two pixels in a filter row; with odd padding windows begin at the second pixel of a cell."""
    return -(-(s.s + s.pad[1] % 2) // 2)


def count_leading_places(s: ConvShape) -> int:
    """Places in front of the first window, so that rows of places begin at a multiple of four pixels."""
    return (s.pad[1] + s.pad[1] % 2) // 2 % 2


def count_padded_channels(s: ConvShape) -> int:
    """Output channels, padded to a multiple of 32."""
    return -(-s.k // 32) * 32


def count_row_elements(s: ConvShape) -> int:
    """Elements of a packed filter: whole rows of 64."""
    return -(-s.r * count_row_cells(s) * 8 // 64) * 64

"""Convolutions of 64 channels and many pixels with weights as operand A (weights_as_a.cu): candidates, packing, the launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.launch import MAX_SHARED, Launch
from whet.tactics._base import Config
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Int32, Pointer, TensorMap
from whet.tactics.cuda._device.kernel import launch
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps

CHANNELS = 64
_WITH_RESIDUAL = 208  # pixels of a product whose residual is loaded at the same time: limited by registers
_FEWEST = 32  # tiles: with less work most multiprocessors have none


@dataclass(frozen=True)
class WeightsAsAConvArguments(Arguments, kernel="weights_as_a.cu"):
    weights: TensorMap  # [64][TAPS * 64] in boxes of 64 x 64; [n][h][w][64]
    input: TensorMap
    added: TensorMap  # with STAGE: residual and result as [n][height * width][64] in boxes of a tile
    made: TensorMap
    bias: ConstFloatPointer
    residual: ConstPointer
    out: Pointer
    k: Int32  # channels and size of the result, tiles of an image
    height: Int32
    width: Int32
    per: Int32
    tiles: Int32
    pad_h: Int32
    pad_w: Int32
    act: ActivationParameters


@dataclass(frozen=True, order=True)
class WeightsAsATile:
    """One instance: result rows of a tile, input tiles in flight."""

    rows: int
    slots: int

    def padded_width(self, s: ConvShape) -> int:
        """Pixels from row to row of a tile."""
        return s.q + s.s - 1

    def bn(self, s: ConvShape) -> int:
        """Pixels of a product."""
        return -(-self.rows * self.padded_width(s) // 8) * 8

    def slot(self, s: ConvShape) -> int:
        """Bytes of a tile's input; mirrors weights_as_a.cu."""
        wide = self.padded_width(s)
        read = max((self.rows + s.r - 1) * wide, self.bn(s) + (s.r - 1) * wide + s.s - 1)
        return -(-read * CHANNELS * 2 // 1024) * 1024

    def stage(self, s: ConvShape) -> int:
        """Bytes of a tile's results if they pass through shared memory: lines of all 64 channels."""
        return 0 if s.k != CHANNELS else -(-self.rows * s.q * CHANNELS * 2 // 1024) * 1024

    def shared(self, s: ConvShape) -> int:
        """Bytes of shared memory."""
        return 1024 + s.r * s.s * CHANNELS * CHANNELS * 2 + self.slots * (self.slot(s) + 8) + 2 * self.stage(s) + 24

    def fits(self, s: ConvShape, residual: bool) -> bool:
        """True if shared memory and registers suffice and there is work for many multiprocessors; staged tiles have no pixels beyond the tile."""
        widest = _WITH_RESIDUAL if residual and not self.stage(s) else 256
        whole = not self.stage(s) or self.bn(s) == self.rows * self.padded_width(s)
        return whole and max(self.bn(s), self.padded_width(s)) <= widest and self.shared(s) <= MAX_SHARED and self.tiles(s) >= _FEWEST

    def tiles(self, s: ConvShape) -> int:
        """Tiles of the whole batch."""
        return s.n * -(-s.p // self.rows)

    @property
    def config(self) -> Config:
        """The engine's record of the configuration."""
        return (("rows", self.rows), ("slots", self.slots))


def why_not_shape(s: ConvShape) -> str | None:
    """Why the kernel does not take a convolution, or None."""
    if s.c != CHANNELS or s.k > CHANNELS or s.k % 8 or s.r * s.s == 1 or s.stride != (1, 1) or s.dilation != (1, 1):
        return f"{s.c} to {s.k} channels, {s.r} x {s.s}; takes 64 input channels, up to 64 output channels, several taps, stride 1 and no dilation"
    if s.q % 2 or s.s % 2 == 0 or s.n * s.p * s.q * s.k >= 2**31:
        return f"rows of {s.q} results by {s.s} taps; takes an even number of results per row"
    return None if list_weights_as_a_tiles(s, True) else f"{s.n} images of {s.p} x {s.q} have too few tiles, or none of a suitable size"


def list_weights_as_a_tiles(s: ConvShape, residual: bool) -> list[WeightsAsATile]:
    """Candidates, sorted by wasted multiply-adds, ascending."""
    kept: dict[int, WeightsAsATile] = {}
    for t in (WeightsAsATile(rows, slots) for rows in range(1, min(s.p, 8) + 1) for slots in (4, 3, 2)):
        if t.fits(s, residual):
            kept.setdefault(t.rows, t)  # the deepest ring that fits
    return sorted(kept.values(), key=lambda t: (t.tiles(s) * (t.bn(s) + 24), t))


def pack_weights_as_a(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Filters [k, 64, r, s] as rows [64s of k][r][s][64]: those of a lane, g and g + 8 of sixteen, are neighbouring channels."""
    k, c, r, s = weights.shape
    rows = np.zeros((-(-k // CHANNELS) * CHANNELS, r, s, c), dtype)
    rows[:k] = weights.transpose(0, 2, 3, 1)
    return np.ascontiguousarray(rows.reshape(-1, 8, 2, r * s * c).transpose(0, 2, 1, 3)).reshape(rows.shape)


def emit_source(constants: dict[str, int]) -> str:
    """The kernel's complete text."""
    return emit_kernel_source("weights_as_a.cu", constants)


def make_constants(t: WeightsAsATile, s: ConvShape, post_ops: PostOps, bf16: bool) -> dict[str, int]:
    """The macros of an instance."""
    return {
        "TAPS_H": s.r,
        "TAPS_W": s.s,
        "WIDE": t.padded_width(s),
        "ROWS": t.rows,
        "BN": t.bn(s),
        "SLOTS": t.slots,
        "ACT": ACTIVATIONS[post_ops.activation[0]],
        "RES": post_ops.residual,
        "STAGE": t.stage(s),
        "BF16": int(bf16),
    }


def make_launch(
    t: WeightsAsATile, s: ConvShape, addresses: tuple[int, ...], post_ops: PostOps, bf16: bool, multiprocessors: int, label: str
) -> Launch:
    """The launch; `addresses`: input, filters, bias, residual (0: none), result."""
    image, filters, bias, residual, out = addresses
    dtype, c, row, pixels = "bf16" if bf16 else "f16", CHANNELS, s.r * s.s * CHANNELS, s.p * s.q
    weights = tensormap.make_tiled_map(filters, dtype, (row, c), (row * 2,), (c, c))
    strides, box = tuple(c * 2 * n for n in (1, s.w, s.w * s.h)), (c, t.padded_width(s), t.rows + s.r - 1, 1)
    pixels_map = tensormap.make_tiled_map(image, dtype, (c, s.w, s.h, s.n), strides, box)
    added = made = bytes(128)  # not used: plain addresses
    if t.stage(s):
        size, each, box = (c, pixels, s.n, 1), (c * 2, pixels * c * 2, s.n * pixels * c * 2), (c, t.rows * s.q, 1, 1)
        added, made = (tensormap.make_tiled_map(at, dtype, size, each, box) for at in (residual or out, out))
    sizes = (s.k, s.p, s.q, -(-s.p // t.rows), t.tiles(s), s.pad[0], s.pad[1])
    arguments = WeightsAsAConvArguments(weights, pixels_map, added, made, bias, residual, out, *sizes, act=post_ops.activation[1:])
    constants, grid = make_constants(t, s, post_ops, bf16), (min(t.tiles(s), multiprocessors), 1, 1)
    return launch("weights_as_a", arguments, constants, grid, 256, shared=t.shared(s), label=label)

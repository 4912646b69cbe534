"""1x1 convolutions, f32 in blocks of channels: accumulators, the activation and a residual stay in registers.

oneDNN's SiLU takes about thirty instructions for 16 values, this one about fifteen. With few input channels the activation is most of the work: 16 to
96 channels, 112x112: 0.56 to 0.33 ms. With ReLU or no epilogue the gain is a few percent.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Config, Packed, Signature, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import is_silu, match_chain
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._blocked_conv import ConvKernel, ConvTactic, Tile, block_counts, list_launches
from whet.tactics.cpu.conv._pointwise_ir import STEP, Variant, emit_pointwise_ir, list_tiles
from whet.tactics.cpu.onednn._kernel import to_f32

_STRIP = 1 << 17  # bytes of an image that stay in L2 with the weights while all groups process them
_IMAGE = 1 << 19  # bytes of a whole image that stays in L2: with more weights than L2 holds, they are read once
_SECOND_CACHE = 1 << 18  # bytes of weights that stay in L2 together with a strip
_FIRST_CACHE = 24 << 10  # bytes of weights and two tiles that stay in L1


class PointwiseKernel(ConvKernel):
    """A planned convolution; packed operands hold weights and biases in groups of a tile's blocks of output channels."""

    name = "pointwise"

    def launch(self, layer: Layer, signature: Signature, tile: Tile) -> tuple[str | jit.Generated, list[int], int, Packed]:
        images, channels, *sides = static_shape(layer.outputs[0].shape)
        pixels, taps = prod(sides), static_shape(self.weights.shape)[1]
        tiles, lanes = -(-pixels // tile.pixels), tile.lanes
        sizes = [pixels, -(-taps // lanes), -(-channels // lanes), taps, tiles, tile.groups, strip_tiles(tile.pixels, tiles, taps, channels)]
        weights, bias, key = self.weights, self.bias, f"{self.constants}|pointwise {tile.blocks} {lanes} {tile.channels}"
        nbytes = tile.groups * (taps + 1) * tile.blocks * lanes * 4
        packed = Packed(key, nbytes, lambda: pack_weights(weights, bias, tile).view(np.uint8), storable=True)
        in_place = bool(signature.inplace) and pixels % tile.pixels > 0
        fits = fits_first_cache(tile.blocks * lanes, tile.pixels, taps)
        variant = Variant(tile.blocks, tile.pixels, lanes, self.steps, jit.has("avx512dq"), fits, in_place=in_place)
        ir = jit.generate_lazily(emit_pointwise_ir, variant)
        return ir, sizes, images * tile.groups * tiles, packed


@tactic
class Pointwise(ConvTactic):
    kernel = PointwiseKernel

    def why_not_conv(self, head: Layer) -> str | None:
        a = head.attrs
        plain = a["group"] == 1 and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or (0,))
        if head.needs(0).type.rank != 4 or tuple(head.needs(1).shape[2:]) != (1, 1) or not plain:
            return "takes 1x1 convolutions of images with one group, no strides, no pads"
        if head.needs(1).shape[1] % STEP:
            return f"{head.needs(1).shape[1]} channels: it takes multiples of {STEP}"
        return None

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        return None if self.configs(layer, signature, backend) else "the image has fewer pixels than the smallest tile"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        """With SiLU, which gains most, all tiles that fit; else the one with fewest multiplications and loads."""
        _, channels, *sides = static_shape(layer.outputs[0].shape)
        chain, pixels, blocks = match_chain(layer), prod(sides), -(-channels // get_registers().lanes)
        pixels_of = dict(list_tiles())
        configs = []
        for b in sorted({1, *block_counts(blocks, list(pixels_of))}):
            sizes = {"blocks": b, "pixels": pixels_of[b]} | ({"rest": pixels_of[blocks % b]} if blocks % b else {})
            tiles = list_launches(layer, sizes)
            if tiles is not None and all(self.fits(layer, signature, t.blocks, t.pixels) for t in tiles):
                configs.append((sum(t.groups * -(-pixels // t.pixels) * (t.blocks * t.pixels + t.blocks + t.pixels) for t in tiles), sizes))
        if isinstance(chain, str) or not any(map(is_silu, chain.steps)):
            configs = sorted(configs, key=lambda f: f[0])[:1]
        return [tuple(sizes.items()) for _, sizes in configs]

    def fits(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> bool:
        return (blocks, pixels) in list_tiles() and prod(static_shape(layer.outputs[0].shape)[2:]) >= pixels


def pack_weights(weights: Tensor, bias: Tensor | None, tile: Tile) -> np.ndarray:
    """Per group of the tile's blocks: for each input channel the output channels of each block, then the biases. f32, flat; padding channels are
    zeros."""
    w = to_f32(weights)[tile.channels]
    biases = None if bias is None else to_f32(bias).reshape(-1)[tile.channels]
    return group_weights(w.reshape(len(w), -1), biases, tile.groups, tile.blocks * tile.lanes)


def group_weights(w: np.ndarray, bias: np.ndarray | None, groups: int, group: int) -> np.ndarray:
    """The same from weights [channels, taps] and biases [channels]; `group` output channels of each group."""
    channels, taps = w.shape
    rows = np.zeros((taps + 1, groups * group), np.float32)
    rows[:taps, :channels] = w.T
    if bias is not None:
        rows[taps, :channels] = bias
    return np.ascontiguousarray(rows.reshape(taps + 1, groups, group).transpose(1, 0, 2)).reshape(-1)


def strip_tiles(pixels: int, tiles: int, taps: int, channels: int = 0) -> int:
    """The number of tiles per strip, which all groups (of `channels` together) process before the next strip."""
    if pixels * tiles * taps * 4 <= _IMAGE and taps * channels * 4 > _SECOND_CACHE:
        return tiles
    return max(1, min(tiles, _STRIP // (pixels * taps * 4)))


def fits_first_cache(channels: int, pixels: int, taps: int) -> bool:
    """True if the weights of a tile's `channels` and two tiles fit L1, so that prefetching the next tile helps."""
    return taps * (channels + 2 * pixels) * 4 <= _FIRST_CACHE

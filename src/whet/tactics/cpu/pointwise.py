"""1x1 convolutions, f32 in blocks of 16 channels, by a kernel of our own: sums and SiLU or ReLU behind them in registers.

oneDNN's SiLU behind a convolution costs about thirty instructions for 16 numbers, this one about fifteen; with few input channels, where the
activation is most of the work, that shows: 16 to 96 channels, 112x112: 0.56 to 0.33 ms. With ReLU or nothing it is a few percent.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Config, Packed, Signature, tactic
from whet.tactics.cpu import _jit
from whet.tactics.cpu._conv_tactic import ConvKernel, ConvTactic, steps_of
from whet.tactics.cpu._ir import WIDE
from whet.tactics.cpu._kernel import f32_of
from whet.tactics.cpu._pointwise_kernel import STEP, TILES, pointwise_ir

_SMALL = 1 << 18  # multiplications that one thread has done before the others are there


class PointwiseKernel(ConvKernel):
    """A planned convolution; its packed operand holds weights and biases in groups of `blocks` of 16 output channels."""

    name = "pointwise"

    def __init__(self, layer: Layer, signature: Signature, blocks: int, tile: int, count: int) -> None:
        super().__init__(layer, signature)
        images, channels, *sides = static_shape(layer.outputs[0].shape)
        pixels, taps = prod(sides), static_shape(self.weights.shape)[1]
        tiles, groups = -(-pixels // tile), -(-channels // (blocks * WIDE))
        items = images * groups * tiles
        sizes = [pixels, -(-taps // WIDE), -(-channels // WIDE), taps, tiles, groups]
        self.share(sizes, items, count, images * channels * pixels * taps, _SMALL)
        weights, bias, key = self.weights, self.bias, f"{self.constants}|pointwise {blocks}"
        self.packed = (Packed(key, groups * (taps + 1) * blocks * WIDE * 4, lambda: packed(weights, bias, blocks).view(np.uint8)),)
        self.ir = pointwise_ir(blocks, tile, self.steps, _jit.has("avx512dq"))
        self.implementation = f"own:{blocks * WIDE} channels x {tile} pixels"


@tactic
class Pointwise(ConvTactic):
    def unfit(self, head: Layer) -> str | None:
        a = head.attrs
        plain = a["group"] == 1 and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or (0,))
        if head.inputs[0].type.rank != 4 or tuple(head.inputs[1].shape[2:]) != (1, 1) or not plain:
            return "is for 1x1 convolutions of images: one group, no strides, no pads"
        if head.inputs[1].shape[1] % STEP:
            return f"{head.inputs[1].shape[1]} channels: it takes multiples of {STEP}"
        return None

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        if not _jit.has("avx512f"):
            return "its tile of 24 sums needs the 32 registers of AVX-512"
        return None if self.configs(layer, signature, machine) else "the image has fewer pixels than the smallest tile"

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> list[Config]:
        """With SiLU, which gains most, all tiles that fit; else the one of fewest multiplications and loads."""
        fit = [(b, p) for b, p in TILES if self.fits(layer, signature, {"blocks": b, "pixels": p})]
        steps, pixels = steps_of(layer), prod(static_shape(layer.outputs[0].shape)[2:])
        assert steps is not None
        if "Silu" not in steps[0]:
            fit = sorted(fit, key=lambda t: -(-pixels // t[1]) * (t[0] * t[1] + sum(t)) / t[0])[:1]
        return [(("blocks", b), ("pixels", p)) for b, p in fit]

    def fits(self, layer: Layer, signature: Signature, sizes: dict[str, int]) -> bool:
        _, channels, *sides = static_shape(layer.outputs[0].shape)
        blocks, pixels = sizes["blocks"], sizes["pixels"]
        if (blocks, pixels) not in TILES or -(-channels // WIDE) % blocks:
            return False
        return prod(sides) >= pixels

    def kernel(self, layer: Layer, signature: Signature, sizes: dict[str, int], count: int) -> PointwiseKernel:
        return PointwiseKernel(layer, signature, sizes["blocks"], sizes["pixels"], count)


def packed(weights: Tensor, bias: Tensor | None, blocks: int) -> np.ndarray:
    """Per group of `blocks`: for each input channel 16 output channels of each block, then the biases. f32, flat; channels that are not there are
    zeros."""
    w = f32_of(weights)
    channels, taps, group = w.shape[0], w.shape[1], blocks * WIDE
    groups = -(-channels // group)
    rows = np.zeros((taps + 1, groups * group), np.float32)
    rows[:taps, :channels] = w.reshape(channels, taps).T
    if bias is not None:
        rows[taps, :channels] = f32_of(bias).reshape(channels)
    return np.ascontiguousarray(rows.reshape(taps + 1, groups, group).transpose(1, 0, 2)).reshape(-1)

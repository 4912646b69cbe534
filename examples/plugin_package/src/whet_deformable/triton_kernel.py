"""The same in Triton, where it is installed."""

from collections.abc import Mapping
from typing import Any

from whet.network import Layer
from whet.plugins import TritonTactic
from whet_deformable.cuda import sizes

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TACTIC: TritonTactic | None = None
NAMES = ("pixels", "channels", "height", "width", "filters", "kh", "kw", "oh", "ow", "sv", "su", "pv", "pu")

if triton is not None:

    @triton.jit
    def deformable_conv(x, w, offset, y, pixels, channels, height, width, filters, kh, kw, oh, ow, sv, su, pv, pu, BLOCK: tl.constexpr):
        """One filter of BLOCK pixels."""
        p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        k = tl.program_id(1)
        valid = p < pixels
        area = oh * ow
        n, pixel = p // area, p % area
        total = tl.zeros((BLOCK,), tl.float32)
        for t in range(kh * kw):
            shift = offset + (n * kh * kw + t) * 2 * area + pixel
            v = (pixel // ow * sv - pv + t // kw).to(tl.float32) + tl.load(shift, valid, 0.0)
            u = (pixel % ow * su - pu + t % kw).to(tl.float32) + tl.load(shift + area, valid, 0.0)
            v0, u0 = tl.floor(v), tl.floor(u)
            for c in range(channels):
                image = x + (n * channels + c) * height * width
                value = tl.zeros((BLOCK,), tl.float32)
                for corner in tl.static_range(4):
                    row, column = v0 + corner // 2, u0 + corner % 2
                    inside = valid & (row >= 0) & (row < height) & (column >= 0) & (column < width)
                    weight = (1 - tl.abs(v - row)) * (1 - tl.abs(u - column))
                    at = tl.where(inside, row, 0.0).to(tl.int32) * width + tl.where(inside, column, 0.0).to(tl.int32)
                    value += tl.load(image + at, inside, 0.0) * tl.where(inside, weight, 0.0)
                total += value * tl.load(w + (k * channels + c) * kh * kw + t)
        tl.store(y + (n * filters + k) * area + pixel, total, valid)

    def parameters(layer: Layer, config: Mapping[str, int | str]) -> dict[str, Any]:
        """The kernel's parameters after its pointers, by name."""
        return {**dict(zip(NAMES, sizes(layer), strict=True)), "BLOCK": 128}

    def grid(layer: Layer, config: Mapping[str, int | str]) -> tuple[int, int]:
        """Blocks of 128 pixels, times the filters."""
        return -(-sizes(layer)[0] // 128), sizes(layer)[4]

    def refuses(layer: Layer) -> str | None:
        """The kernel adds no bias."""
        return "adds no bias" if layer.input(3) is not None else None

    TACTIC = TritonTactic("triton", deformable_conv, grid=grid, parameters=parameters, refuses=refuses, rtol=1e-5)

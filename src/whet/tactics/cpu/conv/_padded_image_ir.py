"""Copies an image of 16-bit values, channels last, with its padding, and for a stride of two with even and odd rows and columns apart, as LLVM IR."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import INT16, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

_BLOCK = 2 * LANES  # values of a vector
WORDS = (
    "source", "target", "height", "width", "channels", "rows", "columns", "phases", "stride", "pad_top", "pad_left", "items", "share",
)  # fmt: skip
"""The image's sizes; rows and columns of each of phases * phases copies; items: their rows, of all samples."""


@cache
def emit_padded_image_ir(rest: int) -> str:
    """`pad(context)`. Pixel (y, x) of copy (p, q) is pixel (y * stride + p - pad_top, x * stride + q - pad_left) of the image, zero outside of it.
    `rest`: channels after whole vectors of 32."""
    module = Module()
    with parallel_kernel(module, "pad", WORDS, "items") as (f, w):
        zeros = f.vector([0] * _BLOCK, INT16)
        with f.loop(w.begin, w.end) as items:
            row, copy = items.index % w.rows, items.index // w.rows
            across, n = copy % w.phases, copy // w.phases
            down, sample = n % w.phases, n // w.phases
            y = row * w.stride + down - w.pad_top
            line = w.source.as_pointer(INT16).at((sample * w.height + y) * w.width * w.channels)
            target = w.target.as_pointer(INT16).at(items.index * w.columns * w.channels)
            is_row = (y > -1) & (y < w.height)
            with f.loop(0, w.columns) as columns:
                x = columns.index * w.stride + across - w.pad_left
                is_inside = is_row & (x > -1) & (x < w.width)
                to = target.at(columns.index * w.channels)
                with f.when(is_inside):
                    _copy(f, line.at(x * w.channels), to, w.channels, zeros, rest)
                with f.when(is_inside ^ 1):
                    _copy(f, None, to, w.channels, zeros, rest)
    return str(module)


def _copy(f: Function, source: Pointer | None, target: Pointer, channels: Value, zeros: Value, rest: int) -> None:
    """The channels of a pixel, or zeros."""
    with f.loop(0, channels - rest, step=_BLOCK) as blocks:
        target.store(source.load(blocks.index, _BLOCK) if source else zeros, blocks.index)
    if rest:
        last, mask = channels - rest, [lane < rest for lane in range(_BLOCK)]
        target.at(last).store_masked(source.at(last).load_masked(mask, zeros) if source else zeros, mask)

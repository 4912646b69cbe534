"""Images with the channels of a pixel side by side, as LLVM IR, for kernels that read pixels at computed positions: a vector of channels is one load
where channels that are planes take a gather for 16 positions. RoiAlign takes two thirds of the time, DeformConv the same time."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.attention._pack_ir import transpose_vectors
from whet.tactics.cpu.generic._loops import Launch, Place, list_context_words


def round_up(channels: int) -> int:
    """Floats of a pixel: whole vectors."""
    return -(-channels // LANES) * LANES


def describe_pixels(batch: int, channels: int, pixels: int, stride: int, target: Place) -> Launch:
    """The launch that copies input 0, [batch, channels, pixels], to [batch, pixels, stride]; values after the channels are of no use."""
    blocks = -(-pixels // LANES)
    return Launch(
        "copy_pixels", emit_pixels_ir(pixels < LANES), (("input", 0), target), batch * blocks, (channels, pixels, blocks, stride),
        work=batch * channels * pixels,
    )  # fmt: skip


@cache
def emit_pixels_ir(is_small: bool) -> str:
    """`copy_pixels(context)`: one item per block of pixels of an image. The last block is the last LANES pixels; `is_small`: there are fewer."""
    module = Module()
    words = list_context_words(("source", "target"), ("channels", "pixels", "blocks", "stride"))
    with parallel_kernel(module, "copy_pixels", words, "items") as (f, w), f.loop(w.begin, w.end) as items:
        image = items.index // w.blocks
        source = w.source.as_pointer(FLOAT).at(image * w.channels * w.pixels)
        target = w.target.as_pointer(FLOAT).at(image * w.pixels * w.stride)
        if is_small:
            with f.loop(0, w.channels) as channels, f.loop(0, w.pixels) as pixels:
                target.store(source.load(channels.index * w.pixels + pixels.index), pixels.index * w.stride + channels.index)
        else:
            first = f.minimum(items.index % w.blocks * LANES, w.pixels - LANES)
            with f.loop(0, w.channels, step=LANES) as channels:
                lines = [source.at(f.minimum(channels.index + k, w.channels - 1) * w.pixels + first) for k in range(LANES)]
                for k, pixel in enumerate(transpose_vectors(f, [line.load_vector() for line in lines])):
                    target.store(pixel, (first + k) * w.stride + channels.index)
    return str(module)


def store_lanes(f: Function, target: Pointer, value: Value, count: Value, rest: Pointer) -> None:
    """Stores the first `count` lanes of a vector, all of them if there are more. `rest` is memory of a vector."""
    with f.when(count > LANES - 1):
        target.store(value)
    with f.when(f.value(LANES) > count):
        rest.store(value)
        with f.loop(0, count) as lanes:
            target.store(rest.load(lanes.index), lanes.index)


def store_transposed(
    f: Function, tile: Pointer, stride: Value, target: Pointer, step: Value | int, channels: Value, count: Value, rest: Pointer
) -> None:
    """Stores the transpose of `tile`, LANES rows of `stride` floats, of which `channels` count: `target` has a row of `count` values for each
    channel, LANES if there are more, `step` floats apart."""
    with f.loop(0, channels, step=LANES) as blocks:
        rows = [tile.load_vector(stride * k + blocks.index) for k in range(LANES)]
        for k, row in enumerate(transpose_vectors(f, rows)):
            channel = blocks.index + k
            with f.when(channel < channels):
                store_lanes(f, target.at(channel * step), row, count, rest)

"""1x1 convolutions and the following moves, as LLVM IR: channels of some pixels go to cache-resident memory, then result rows are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm.builder import FLOAT, INT64, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.conv._pointwise_ir import STEP, add_channels
from whet.tactics.cpu.move._moves_ir import emit_rows_function
from whet.tactics.cpu.move._moves_ir import list_context_words as moves_words

RUN = 4  # values of a run in its table: first row, first pixel, pixels, rows of each
_WORD = 8  # bytes


@dataclass(frozen=True)
class Level:
    """One convolution: its source index in the moves; pixels of an image, input blocks of channels, input channels, groups of output blocks, the
    pixel pitch of its result in floats; number of items, and pixels per item; first run in the table, and number of runs."""

    source: int
    pixels: int
    blocks: int
    taps: int
    groups: int
    pitch: int
    items: int
    tile: int
    first_run: int
    runs: int


def list_context_words(levels: int) -> tuple[str, ...]:
    """The context of `heads`: addresses of the result, the moves' constants, the table of runs and the scratch; image and weights of each level;
    items, and items per thread."""
    each = (w for k in range(levels) for w in (f"image{k}", f"weights{k}"))
    return ("target", "numbers", "table", "scratch", *each, "items", "share")


def count_header_bytes(levels: int) -> int:
    """Bytes of the context of the moves, before a thread's pixels."""
    return -(-len(moves_words(levels)) * _WORD // 64) * 64


def count_thread_bytes(levels: Sequence[Level], pixels: int) -> int:
    """Scratch bytes per thread; `pixels` of a register tile, since the first one may begin before the item's pixels."""
    return count_header_bytes(len(levels)) + max((x.tile + pixels) * x.pitch for x in levels) * 4


def emit_heads_ir(moves: Moves, levels: Sequence[Level], blocks: int, pixels: int, lanes: int, has_avx512dq: bool) -> str:
    """`heads(context)`: items are tiles of pixels, level by level. The levels' results are the sources of `moves`, stored channels last with the
    levels' pitches. Register tiles have `blocks` of `lanes` channels by `pixels`. Raises Refused.
    """
    module = Module()
    make_rows = emit_rows_function(module, moves, has_avx512dq)
    convolve = _convolve(module, blocks, pixels, lanes)
    inner_words = moves_words(len(levels))
    with parallel_kernel(module, "heads", list_context_words(len(levels)), "items") as (f, w):
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        own = w.scratch + me * count_thread_bytes(levels, pixels)
        inner_context = own.as_pointer(INT64)
        inner_context.store(w.target, inner_words.index("target"))
        inner_context.store(w.numbers, inner_words.index("numbers"))
        memory = (own + count_header_bytes(len(levels))).as_pointer(FLOAT)
        runs = w.table.as_pointer(INT64)
        with f.loop(w.begin, w.end) as items:
            cases, before = [], 0
            for k, level in enumerate(levels):
                addresses = getattr(w, f"image{k}"), getattr(w, f"weights{k}")
                item = _Item(f, level, items.index, before, pixels, lanes, memory, inner_context, inner_words.index(f"source{level.source}"))
                before += level.items
                last = k + 1 == len(levels)
                cases.append((None if last else items.index < before, lambda i=item, a=addresses: i.emit(*a, convolve, runs, make_rows)))
            f.choose(cases)
    return str(module)


@dataclass
class _Item:
    """One item of a level. The moves read the level's image at the address in `word` of their context, which is offset so that each pixel of the item
    is found in `memory` at its index in the image."""

    f: Function
    level: Level
    index: Value
    before: int  # number of items of the previous levels
    pixels: int
    lanes: int
    memory: Pointer
    context: Pointer
    word: int

    def emit(self, image: Value, weights: Value, convolve: Function, runs: Pointer, make_rows: Function) -> list[Value]:
        f, level = self.f, self.level
        tiles = -(-level.pixels // level.tile)
        item = self.index - self.before
        n, tile = item // tiles, item % tiles
        first = tile * level.tile
        count = f.minimum(first + level.tile, level.pixels) - first
        source, weights_at = image.as_pointer(FLOAT), weights.as_pointer(FLOAT)
        x = source.at(n * (level.blocks * level.pixels * self.lanes)).at(first * self.lanes)
        y = self.memory.at(self.pixels * level.pitch)
        f.call(convolve, x, weights_at, y, level.pixels * self.lanes, level.taps, level.groups, level.pitch, count)
        begin = n * level.pixels + first
        end = begin + count
        self.context.store(y.as_integer() + begin * (-level.pitch * 4), self.word)
        with f.loop(level.first_run, level.first_run + level.runs, at_least_once=True) as loop:
            run = runs.at(loop.index * RUN)
            row, pixel, many, each = (run.load(k) for k in range(RUN))
            low, high = f.maximum(begin, pixel), f.minimum(end, pixel + many)
            with f.when(low < high):
                f.call(make_rows, self.context, row + (low - pixel) * each, row + (high - pixel) * each)
        return []


def _convolve(module: Module, blocks: int, pixels: int, lanes: int) -> Function:
    """`convolve(x, weights, y, plane, taps, groups, pitch, count)`: convolves `count` pixels of a blocked image to rows of all output channels with
    the pitch `pitch` in floats.

    The last register tile ends at the last pixel, and begins before the first one if there are fewer pixels. Weights are packed in groups of
    `blocks`: for each input channel and block its output channels, then the biases (pointwise_conv.pack_weights).
    """
    with module.function("convolve", ["float*", "float*", "float*", *["i64"] * 5]) as f:
        x, all_weights, y, plane, taps, groups, pitch, count = f.arguments
        assert isinstance(x, Pointer)
        assert isinstance(all_weights, Pointer)
        assert isinstance(y, Pointer)
        last = count - pixels
        taps_size = taps * (blocks * lanes)
        group_size = taps_size + blocks * lanes
        iterations = taps // STEP
        with f.loop(0, groups, at_least_once=True) as group:
            weights = all_weights.at(group.index * group_size)
            biases = weights.at(taps_size)
            y_group = y.at(group.index * (blocks * lanes))
            start = [bias for bias in (biases.load(j * lanes, lanes) for j in range(blocks)) for _ in range(pixels)]
            with f.loop(0, count, step=pixels, at_least_once=True) as tiles:
                pixel = f.minimum(tiles.index, last)
                x_tile, y_tile = x.at(pixel * lanes), y_group.at(pixel * pitch)
                with f.loop(0, iterations, carried=start, at_least_once=True) as inner:
                    block, within = inner.index // (lanes // STEP), inner.index % (lanes // STEP)
                    x_now = x_tile.at(block * plane + within * STEP)
                    inner.carry(*add_channels(f, x_now, weights.at(inner.index * (STEP * blocks * lanes)), blocks, pixels, inner.values))
                for p in range(pixels):
                    out = y_tile.at(pitch * p)
                    for j in range(blocks):
                        out.store(inner.results[j * pixels + p], j * lanes)
    return f

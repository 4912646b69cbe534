"""An inverted residual in blocks of channels, as LLVM IR: bands of rows of the result, whose expanded channels stay in the caches of a core.

For a band, a thread expands a few blocks of channels at a time to its own memory, with a margin of zeros to the left and to the right, and applies
the depthwise convolution to them; the projection reads the depthwise results of all blocks. Rows of the expanded image that two bands read are
computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_fast_chain
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.conv._pointwise_ir import STEP, add_channels

_SIZES = (
    "height", "width", "rows", "columns", "channels", "input_blocks", "groups", "output_groups", "pad_top", "pad_left", "line", "band", "bands",
    "thread_floats", "items", "share",
)  # fmt: skip
"""Sizes of the image and of the result; input channels and their blocks; groups of expanded blocks and of output blocks; pads; columns of an expanded
row with its margins; rows of a band, bands of a sample; floats of a thread's memory; samples * bands; items per thread."""
_PACKED = ("expansion", "taps", "projection")


@dataclass(frozen=True)
class Tile:
    """Blocks of channels by pixels that are accumulated in registers."""

    blocks: int
    pixels: int


@dataclass(frozen=True)
class Form:
    """The compile-time parameters: window and stride; tiles of the expansion and of the projection, pixels of a tile of the depthwise convolution;
    channels of a block; the epilogues of the first two convolutions; whether a residual is added."""

    window: int
    stride: int
    expansion: Tile
    filtered: int
    projection: Tile
    lanes: int
    expansion_steps: tuple[Step, ...]
    filter_steps: tuple[Step, ...]
    has_residual: bool
    has_avx512dq: bool


def list_context_words(has_residual: bool) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    return ("source", "target", *(("added",) if has_residual else ()), "scratch", *_SIZES, *_PACKED)


def count_band_inputs(band: int, window: int, stride: int) -> int:
    """Rows of the expanded image that a band of so many rows of the result reads."""
    return (band - 1) * stride + window


@cache
def emit_inverted_residual_ir(form: Form) -> str:
    """`inverted_residual(context)`. The weights of both pointwise convolutions are packed as by pointwise_conv.py, in groups of the tile's blocks,
    those of the depthwise convolution as by depthwise_conv.py. Last tiles and bands overlap those before."""
    module = Module()
    with parallel_kernel(module, "inverted_residual", list_context_words(form.has_residual), "items") as (f, words):
        _Kernel(f, words, form).emit()
    return str(module)


class _Kernel:
    """The body of the function for a range of items, which are bands."""

    def __init__(self, f: Function, words: SimpleNamespace, form: Form) -> None:
        self.f, self.w, self.form = f, words, form
        kinds = {s.op for s in (*form.expansion_steps, *form.filter_steps)}
        self.activations = Activations(f, form.has_avx512dq, form.lanes, has_gelu="Gelu" in kinds)
        (me,) = f.choose([(emit_thread_count(words.context) > 1, lambda: [emit_thread_index(f, words.context)]), (None, lambda: [f.value(0)])])
        self.band_inputs = (words.band - 1) * form.stride + form.window
        self.expanded_plane = self.band_inputs * words.line * form.lanes
        self.filtered_plane = words.band * words.columns * form.lanes
        self.expanded = words.scratch.as_pointer(FLOAT).at(me * words.thread_floats)
        self.filtered = self.expanded.at(self.expanded_plane * form.expansion.blocks)

    def emit(self) -> None:
        f, w, form = self.f, self.w, self.form
        self._clear_margins()
        with f.loop(w.begin, w.end) as items:
            band, n = items.index % w.bands, items.index // w.bands
            first = f.minimum(band * w.band, w.rows - w.band)
            top = first * form.stride - w.pad_top
            with f.loop(0, w.groups) as groups:
                self._expand(n, groups.index, top)
                with f.loop(0, form.expansion.blocks) as blocks:
                    self._filter(blocks.index, groups.index * form.expansion.blocks + blocks.index, top)
            self._project(n, first)

    def _clear_margins(self) -> None:
        f, w, lanes = self.f, self.w, self.form.lanes
        zero, right = f.value(0.0, FLOAT).broadcast(lanes), w.pad_left + w.width
        with f.loop(0, self.band_inputs * self.form.expansion.blocks) as lines:
            line = self.expanded.at(lines.index * w.line * lanes)
            for begin, end in ((f.value(0), w.pad_left), (right, w.line)):
                with f.loop(begin, end) as columns:
                    line.store(zero, columns.index * lanes)

    def _expand(self, n: Value, group: Value, top: Value) -> None:
        """A group's blocks of the rows of the image that the band at `top` reads."""
        f, w, lanes = self.f, self.w, self.form.lanes
        blocks, pixels = self.form.expansion.blocks, self.form.expansion.pixels
        plane = w.height * w.width * lanes
        image = w.source.as_pointer(FLOAT).at(n * w.input_blocks * plane)
        weights = w.expansion.as_pointer(FLOAT).at(group * (w.channels + 1) * (blocks * lanes))
        with f.loop(f.maximum(0 - top, 0), f.minimum(w.height - top, self.band_inputs)) as rows:
            x_row = image.at((top + rows.index) * w.width * lanes)
            y_row = self.expanded.at((rows.index * w.line + w.pad_left) * lanes)
            with f.loop(0, w.width, step=pixels) as tiles:
                column = f.minimum(tiles.index, w.width - pixels) * lanes
                sums = self._multiply(x_row.at(column), weights, plane, w.channels, blocks, pixels)
                y = y_row.at(column)
                for j in range(blocks):
                    block = y.at(self.expanded_plane * j)
                    for p in range(pixels):
                        block.store(self._activate(sums[j * pixels + p], self.form.expansion_steps), p * lanes)

    def _filter(self, place: Value, block: Value, top: Value) -> None:
        """The depthwise convolution of a block of channels, whose expanded values are at `place` of the group."""
        f, w, form = self.f, self.w, self.form
        window, stride, pixels, lanes = form.window, form.stride, form.filtered, form.lanes
        x = self.expanded.at(place * self.expanded_plane)
        y = self.filtered.at(block * self.filtered_plane)
        taps = w.taps.as_pointer(FLOAT).at(block * ((window * window + 1) * lanes))
        bias = taps.load(window * window * lanes, lanes)
        with f.loop(0, w.band) as rows:
            row = rows.index * stride
            first_tap, end_tap = f.maximum(0 - (top + row), 0), f.minimum(w.height - (top + row), window)
            with f.loop(0, w.columns, step=pixels) as tiles:
                column = f.minimum(tiles.index, w.columns - pixels)
                x_tile = x.at((row * w.line + column * stride) * lanes)
                with f.loop(first_tap, end_tap, carried=[bias] * pixels, at_least_once=True) as tap_rows:
                    x_row, row_taps = x_tile.at(tap_rows.index * w.line * lanes), taps.at(tap_rows.index * (window * lanes))
                    sums = list(tap_rows.values)
                    for t in range(window):
                        weight = row_taps.load(t * lanes, lanes)
                        for p in range(pixels):
                            sums[p] = f.fma(x_row.load((p * stride + t) * lanes, lanes), weight, sums[p])
                    tap_rows.carry(*sums)
                y_tile = y.at((rows.index * w.columns + column) * lanes)
                for p in range(pixels):
                    y_tile.store(self._activate(tap_rows.results[p], form.filter_steps), p * lanes)

    def _project(self, n: Value, first: Value) -> None:
        """The band's rows of the result, from row `first` on."""
        f, w, lanes = self.f, self.w, self.form.lanes
        blocks, pixels = self.form.projection.blocks, self.form.projection.pixels
        hidden = w.groups * (self.form.expansion.blocks * lanes)
        plane, count = w.rows * w.columns * lanes, w.band * w.columns
        start = n * w.output_groups * blocks * plane + first * w.columns * lanes
        with f.loop(0, w.output_groups) as groups:
            weights = w.projection.as_pointer(FLOAT).at(groups.index * (hidden + 1) * (blocks * lanes))
            with f.loop(0, count, step=pixels) as tiles:
                pixel = f.minimum(tiles.index, count - pixels) * lanes
                sums = self._multiply(self.filtered.at(pixel), weights, self.filtered_plane, hidden, blocks, pixels)
                at = start + groups.index * blocks * plane + pixel
                for j in range(blocks):
                    offset = at + plane * j
                    y = w.target.as_pointer(FLOAT).at(offset)
                    added = w.added.as_pointer(FLOAT).at(offset) if self.form.has_residual else None
                    for p in range(pixels):
                        total = sums[j * pixels + p]
                        y.store(total if added is None else total + added.load(p * lanes, lanes), p * lanes)

    def _multiply(self, x: Pointer, weights: Pointer, plane: Value, channels: Value, blocks: int, pixels: int) -> list[Value]:
        """The sums of a tile: its biases, which follow the weights, and the products of all `channels`."""
        f, lanes = self.f, self.form.lanes
        biases = weights.at(channels * (blocks * lanes))
        start = [bias for bias in (biases.load(j * lanes, lanes) for j in range(blocks)) for _ in range(pixels)]
        with f.loop(0, channels // STEP, carried=start, at_least_once=True) as inner:
            index = f.opaque(inner.index)
            block, within = index // (lanes // STEP), index % (lanes // STEP)
            x_now = x.at(block * plane + within * STEP)
            inner.carry(*add_channels(f, x_now, weights.at(index * (STEP * blocks * lanes)), blocks, pixels, inner.values))
        return inner.results

    def _activate(self, x: Value, steps: Sequence[Step]) -> Value:
        return emit_fast_chain(self.f, self.activations, steps, x, None)

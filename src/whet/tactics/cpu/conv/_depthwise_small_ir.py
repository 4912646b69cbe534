"""Depthwise convolution of bf16 or f16, channels last, as LLVM IR: 32 channels of a few pixels of a row are accumulated in f32.

A vector of 32 bf16 holds two of f32: shifted to the left by 16 bits the channels with even indices, with the lower halves cleared the odd ones.
Weights and accumulators are divided in the same way, so that no other instruction rearranges them before the results are rounded. Of f16 one
instruction converts the first 16 channels, another one the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.network import BF16, DType
from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_fast_chain
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import round_to_small_float, widen_small_float
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

BLOCK = 2 * LANES  # channels of a vector of 16-bit values
_SIZES = ("height", "width", "rows", "columns", "channels", "groups", "group_blocks", "pad_top", "pad_left", "tiles", "items")
"""Sizes of the image and of the result, channels; groups of blocks of channels, whole blocks of a group; padding; tiles of a row;
samples * rows * groups."""
_WORDS = Type("i32", LANES)


@dataclass(frozen=True)
class Form:
    """The compile-time parameters: the window's side, the stride, pixels of a tile, channels of the last block if it is not whole, the epilogue, the
    type in memory."""

    window: int
    stride: int
    pixels: int
    rest: int
    steps: tuple[Step, ...]
    stored: DType = BF16


def list_context_words(steps: Sequence[Step]) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    added = ("added",) if any(s.reads_residual for s in steps) else ()
    return ("source", "target", *added, *_SIZES, *LAST_WORDS)


@cache
def emit_depthwise_small_ir(form: Form) -> str:
    """`depthwise(context)`. The packed operand has for each block of channels the taps, row by row, then the biases: f32, of bf16 even channels
    before odd ones. The last tile of a row overlaps the one before."""
    module = Module()
    with parallel_kernel(module, "depthwise", list_context_words(form.steps), "items") as (f, words):
        _Kernel(f, words, form).emit()
    return str(module)


class _Kernel:
    """The body of the function for a range of items: rows of the result, in groups of channels."""

    def __init__(self, f: Function, words: SimpleNamespace, form: Form) -> None:
        self.f, self.w, self.form = f, words, form
        self.activations = Activations(f, True, has_gelu=any(s.op == "Gelu" for s in form.steps))
        self.block_floats = (form.window**2 + 1) * BLOCK

    def emit(self) -> None:
        f, w, form = self.f, self.w, self.form
        pixel, line = w.channels, w.width * w.channels
        last_tile = w.columns - form.pixels
        with f.loop(w.begin, w.end) as items:
            group, n = items.index % w.groups, items.index // w.groups
            row, sample = n % w.rows, n // w.rows
            top = row * form.stride - w.pad_top
            first_row, end_row = f.maximum(0 - top, 0), f.minimum(w.height - top, form.window)
            first_block = group * w.group_blocks
            end_block = f.minimum(first_block + w.group_blocks, w.channels // BLOCK)
            x_row = w.source.as_pointer(INT16).at((sample * w.height + top) * line)
            y_row = n * (w.columns * w.channels)
            with f.loop(0, w.tiles) as tiles:
                column = f.minimum(tiles.index * form.pixels, last_tile)
                left = column * form.stride - w.pad_left
                x, y = x_row.at(left * pixel), y_row + column * pixel
                count = (form.pixels - 1) * form.stride + form.window
                is_inside = (left > -1) & (left + count < w.width + 1)
                for inside in (True, False):
                    with f.when(is_inside if inside else is_inside ^ 1):
                        valid = None if inside else self._list_valid(left, count)
                        with f.loop(first_block, end_block) as blocks:
                            self._emit_tile(x, y, blocks.index, first_row, end_row, line, valid, BLOCK)
                        if form.rest:
                            with f.when(group.equals(w.groups - 1)):
                                self._emit_tile(x, y, w.channels // BLOCK, first_row, end_row, line, valid, form.rest)

    def _list_valid(self, left: Value, count: int) -> list[Value]:
        """For each column from `left` on all bits of an i32 if it is inside the image, else none."""
        columns = [left + c for c in range(count)]
        return [((column > -1) & (column < self.w.width)).convert("sext", INT32) for column in columns]

    def _emit_tile(
        self, x: Pointer, y: Value, block: Value, first_row: Value, end_row: Value, line: Value, valid: Sequence[Value] | None, lanes: int
    ) -> None:
        """The results of a tile for `lanes` channels of a block. `x`: the tile's first column in the first row of the window."""
        f, form = self.f, self.form
        taps = self.w.packed.as_pointer(FLOAT).at(block * self.block_floats)
        bias = [taps.load_vector((form.window**2 * 2 + half) * LANES) for half in range(2)]
        channel = block * BLOCK
        with f.loop(first_row, end_row, carried=bias * form.pixels, at_least_once=True) as rows:
            sums = list(rows.values)
            source = x.at(rows.index * line + channel)
            weights = taps.at(rows.index * (form.window * BLOCK))
            for c in range((form.pixels - 1) * form.stride + form.window):
                users = [(j, c - j * form.stride) for j in range(form.pixels) if 0 <= c - j * form.stride < form.window]
                if not users:
                    continue
                halves = self._load(source.at(self.w.channels * c), valid[c] if valid else None, lanes)
                for half, number in enumerate(halves):
                    for j, t in users:
                        k = 2 * j + half
                        sums[k] = f.fma(number, weights.load_vector((2 * t + half) * LANES), sums[k])
            rows.carry(*sums)
        for j in range(form.pixels):
            self._emit_result(rows.results[2 * j : 2 * j + 2], y + self.w.channels * j + channel, lanes)

    def _load(self, source: Pointer, valid: Value | None, lanes: int) -> list[Value]:
        """The even and the odd channels of a pixel (of f16: the first 16 and the others); zeros outside the image."""
        f = self.f
        if self.form.stored != BF16:
            return [self._load_half(source.at(half * LANES), valid, min(lanes - half * LANES, LANES)) for half in range(2)]
        if valid is None and lanes == BLOCK:
            loaded = source.load(0, BLOCK)
        else:
            bits = f.value((1 << lanes) - 1 - (1 << 32 if lanes == BLOCK else 0), INT32)
            chosen = bits if valid is None else valid & bits
            loaded = source.load_masked(f.mask_of_bits(chosen, BLOCK), f.vector([0] * BLOCK, INT16))
        words = f.emit(_WORDS, f"bitcast {loaded} to {_WORDS}", loaded)
        return [(words << 16).convert("bitcast", FLOAT), (words & -(1 << 16)).convert("bitcast", FLOAT)]

    def _load_half(self, source: Pointer, valid: Value | None, lanes: int) -> Value:
        f, zeros = self.f, self.f.vector([0] * LANES, INT16)
        if lanes <= 0:
            return f.vector([0.0] * LANES)
        if valid is None and lanes == LANES:
            loaded = source.load_vector()
        elif valid is None:
            loaded = source.load_masked([lane < lanes for lane in range(LANES)], zeros)
        else:
            bits = (valid & ((1 << lanes) - 1)).convert("trunc", INT16)
            loaded = source.load_masked(f.mask_of_bits(bits, LANES), zeros)
        return widen_small_float(loaded, self.form.stored)

    def _emit_result(self, sums: Sequence[Value], offset: Value, lanes: int) -> None:
        f, form = self.f, self.form
        residual: list[Value | None] = [None, None]
        if any(s.reads_residual for s in form.steps):
            residual = list(self._load(self.w.added.as_pointer(INT16).at(offset), None, lanes))
        results = [emit_fast_chain(f, self.activations, form.steps, x, other) for x, other in zip(sums, residual, strict=True)]
        first, second = (round_to_small_float(f, x, form.stored) for x in results)
        in_order = range(BLOCK) if form.stored != BF16 else [half * LANES + k for k in range(LANES) for half in range(2)]
        values = f.shuffle(first, second, list(in_order))
        target = self.w.target.as_pointer(INT16).at(offset)
        if lanes == BLOCK:
            target.store(values)
        else:
            target.store_masked(values, [lane < lanes for lane in range(BLOCK)])

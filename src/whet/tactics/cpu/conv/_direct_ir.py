"""Convolution in blocks of channels, as LLVM IR: a tile of pixels of a row by blocks of output channels in registers, then the epilogue.

Taps of a row and some input channels are unrolled; input blocks and the window's rows are loops with bounds that exclude rows outside the image.
The first and the last tile of a row have separate code, without the taps outside the image.

During a row of taps, the pixels of the next row of taps are prefetched: the window's next row, else the first row in the next block of channels, else
that of the next tile. They are in L2 or beyond, and the hardware prefetcher does not detect a stride of two rows (64 to 128 channels at 160x160,
stride 2: 3.72 to 3.41 ms on Cascade Lake; stride 1: 1 to 2 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_float_chain
from whet.tactics.cpu._llvm.registers import LINE, Registers
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

MOST = 5  # maximum blocks of a tile
_COLUMN_STRIDE = 3  # order of columns: adjacent ones would add to the same accumulators and wait for each other (3x6x6: 10 %)
Taps = tuple[tuple[int, int], ...]
"""For each tap of a row, the range of a tile's pixels with the tap inside the image."""
_WORDS = ("source", "weights", "target")
_SIZES = (
    "height", "width", "rows", "columns", "channels", "output_blocks", "groups", "pad_top", "pad_left", "by_rows", "input_blocks", "section",
    "items", "share",
)  # fmt: skip


def list_context_words(steps: tuple[Step, ...]) -> tuple[str, ...]:
    """Names of the context's words, in order.

    Addresses (last: the residual, if there is one); sizes of the image and of the result; input channels, blocks of the result, groups of output
    blocks of this launch; padding; item order: rows outer and groups inner (1) or groups outer and rows inner (0); blocks of the image;
    groups of output blocks that read the same input channels; samples * groups * rows; items per thread.
    """
    return (*_WORDS, *(["added"] if any(s.reads_residual for s in steps) else []), *_SIZES)


@dataclass(frozen=True)
class Form:
    """The compile-time parameters of a kernel."""

    registers: Registers
    window: tuple[int, int]
    strides: tuple[int, int]
    blocks: int  # of output channels per tile
    pixels: int  # per tile
    unroll: int  # input channels per iteration of the inner loop; divides `step`
    planes: bool  # the image is stored plane by plane, not in blocks of channels
    first: Taps
    last: Taps | None  # None: a row is one tile
    steps: tuple[Step, ...]  # the epilogue; its residual is an image as large as the result
    has_avx512dq: bool

    @property
    def lanes(self) -> int:
        """Output channels of a block."""
        return self.registers.lanes

    @property
    def step(self) -> int:
        """Input channels of a block."""
        return 1 if self.planes else self.lanes

    @property
    def shared(self) -> bool:
        """True if the weights of all taps of a row fit into registers: each input value is then broadcast once for all its taps."""
        return self.blocks * (self.pixels + self.window[1]) < self.registers.count

    @property
    def prefetched(self) -> int:
        """Cache lines that an iteration of the inner loop prefetches, so that a block's iterations cover the tile's reads of a row; 0: none. Planes
        have only a few; five blocks of accumulators leave no register for the address."""
        if self.planes or self.blocks == MOST:
            return 0
        return -(-((self.pixels - 1) * self.strides[1] + self.window[1]) * self.unroll // LINE)


@cache
def emit_direct_ir(form: Form) -> str:
    """`direct(context)` for one form.

    Weights are packed in groups of `blocks` of output channels: for each block of input channels, row of the window, input channel and tap of the
    row, the group's output channels; then its biases. A row has at least `pixels` columns; its last tile ends at the row's end and overlaps the
    previous one.
    """
    module = Module()
    with parallel_kernel(module, "direct", list_context_words(form.steps), "items") as (f, words):
        _emit_rows(f, words, form)
    return str(module)


def _emit_rows(f: Function, w: SimpleNamespace, form: Form) -> None:
    """All rows of the result between w.begin and w.end."""
    activations, lanes = Activations(f, form.has_avx512dq, form.lanes), form.lanes
    source, weights, target = (word.as_pointer(FLOAT) for word in (w.source, w.weights, w.target))
    added = w.added.as_pointer(FLOAT) if any(s.reads_residual for s in form.steps) else None
    line = w.width * form.step
    plane = w.height * line
    blocks = (w.channels + (form.step - 1)) // form.step
    sample = w.input_blocks * plane
    out_line = w.columns * lanes
    out_plane = w.rows * out_line
    out_group, out_sample = out_plane * form.blocks, out_plane * w.output_blocks
    taps = blocks * (form.window[0] * form.step * form.window[1] * form.blocks * lanes)
    group_size = taps + form.blocks * lanes
    last_column = w.columns - form.pixels
    by_rows = w.by_rows.differs(0)
    inner, outer = f.select(by_rows, w.groups, w.rows), f.select(by_rows, w.rows, w.groups)
    with f.loop(w.begin, w.end) as items:
        inner_index, rest = items.index % inner, items.index // inner
        outer_index, n = rest % outer, rest // outer
        row, group = f.select(by_rows, outer_index, inner_index), f.select(by_rows, inner_index, outer_index)
        y = row * form.strides[0] - w.pad_top
        first_row = f.maximum(0 - y, 0)
        end_row = f.minimum(w.height - y, form.window[0])
        x_row = source.at(n * sample + group // w.section * (blocks * plane)).at(y * line)
        group_weights = weights.at(group * group_size)
        biases = group_weights.at(taps)
        bias = [biases.load(j * lanes, lanes) for j in range(form.blocks)]
        out = n * out_sample + group * out_group + row * out_line
        with f.repeat(f.value(0)) as tiles:
            (column,) = tiles.values
            is_last = column.equals(last_column)
            x = x_row.at((column * form.strides[1] - w.pad_left) * form.step)
            image = _Image(f, form, x, group_weights, plane, line, blocks, w.channels, first_row, end_row)
            first, inside = partial(image.accumulate, form.first, bias), partial(image.accumulate, _list_all_taps(form), bias)
            if form.last is None:
                sums = first()
            else:
                sums = f.choose([(column.equals(0), first), (is_last, partial(image.accumulate, form.last, bias)), (None, inside)])
            at = out + column * lanes
            _store(f, activations, form, sums, target.at(at), None if added is None else added.at(at), out_plane)
            tiles.repeat_unless(is_last, f.minimum(column + form.pixels, last_column))


def _list_all_taps(form: Form) -> Taps:
    return ((0, form.pixels),) * form.window[1]


def _store(f: Function, activations: Activations, form: Form, sums: list[Value], y: Pointer, added: Pointer | None, plane: Value) -> None:
    """Applies the epilogue to a tile's accumulators and stores them."""
    lanes = form.lanes
    for j in range(form.blocks):
        target = y.at(plane * j)
        addend = None if added is None else added.at(plane * j)
        for p in range(form.pixels):
            residual = None if addend is None else addend.load(p * lanes, lanes)
            target.store(emit_float_chain(f, activations, form.steps, sums[j * form.pixels + p], residual), p * lanes)


@dataclass
class _Image:
    """One tile's window: addresses of its pixels and of the group's weights, sizes in floats, and the window's rows inside the image."""

    f: Function
    form: Form
    x: Pointer
    weights: Pointer
    plane: Value
    line: Value
    blocks: Value
    channels: Value
    first_row: Value
    end_row: Value

    def accumulate(self, taps: Taps, bias: list[Value]) -> list[Value]:
        """The tile's accumulators, all pixels of a block before those of the next."""
        f, form = self.f, self.form
        channel = form.window[1] * form.blocks * form.lanes  # weights of an input channel and a row of taps
        start = [bias[j] for j in range(form.blocks) for _ in range(form.pixels)]
        with f.loop(0, self.blocks, carried=start, at_least_once=True) as blocks:
            x_block = self.x.at(blocks.index * self.plane)
            weights_block = self.weights.at(blocks.index * (form.window[0] * form.step * channel))
            iterations = f.minimum(self.channels - blocks.index * form.step, form.step) // form.unroll
            with f.loop(self.first_row, self.end_row, carried=blocks.values, at_least_once=True) as rows:
                x_row = x_block.at(rows.index * self.line)
                weights_row = weights_block.at(rows.index * (form.step * channel))
                following = self._next_row(rows.index, blocks.index) if form.prefetched else None
                with f.loop(0, iterations, carried=rows.values, at_least_once=True) as inner:
                    x, weights = x_row.at(inner.index * form.unroll), weights_row.at(inner.index * (form.unroll * channel))
                    if following is not None:
                        lines = following.at(inner.index * (form.prefetched * LINE))
                        for k in range(form.prefetched):
                            lines.prefetch(k * LINE)
                        f.scheduling_barrier()
                    inner.carry(*self._add_row(x, weights, taps, inner.values))
                rows.carry(*inner.results)
            blocks.carry(*rows.results)
        return blocks.results

    def _next_row(self, row: Value, block: Value) -> Pointer:
        """The pixels of the next row of taps: the window's next row, else the next block's first one, else the next tile's."""
        f = self.f
        next_row, next_block = row + 1, block + 1
        in_window, in_image = next_row < self.end_row, next_block < self.blocks
        other_block = f.select(in_image, next_block, 0)
        next_row = f.select(in_window, next_row, self.first_row)
        next_block = f.select(in_window, block, other_block)
        across = f.select(in_window | in_image, f.value(0), self.form.pixels * self.form.strides[1])
        return self.x.at(next_block * self.plane).at(next_row * self.line).at(across * self.form.step)

    def _add_row(self, x: Pointer, weights: Pointer, taps: Taps, sums: list[Value]) -> list[Value]:
        """The accumulators after a row of taps of `unroll` channels."""
        f, form, lanes = self.f, self.form, self.form.lanes
        sums = list(sums)
        width, stride = form.window[1], form.strides[1]
        vectors: dict[int, list[Value]] = {}

        def load_weights(u: int, s: int) -> None:
            vectors[s] = [weights.load(((u * width + s) * form.blocks + j) * lanes, lanes) for j in range(form.blocks)]

        def add_column(u: int, i: int, pairs: list[tuple[int, int]]) -> None:
            """Multiplies the value of column `i` by the weights of (tap, pixel) pairs."""
            number = x.load(i * form.step + u).broadcast(lanes)
            for s, p in pairs:
                for j in range(form.blocks):
                    k = j * form.pixels + p
                    sums[k] = f.fma(number, vectors[s][j], sums[k])
            f.scheduling_barrier()

        for u in range(form.unroll):
            if form.shared:
                for s in range(width):
                    load_weights(u, s)
                columns = (form.pixels - 1) * stride + width
                for i in [i for first in range(_COLUMN_STRIDE) for i in range(first, columns, _COLUMN_STRIDE)]:
                    pairs = [(s, (i - s) // stride) for s in range(width) if (i - s) % stride == 0 and (i - s) // stride in range(*taps[s])]
                    if pairs:
                        add_column(u, i, pairs)
            else:
                for s in range(width):
                    load_weights(u, s)
                    for p in range(*taps[s]):
                        add_column(u, p * stride + s, [(s, p)])
        return sums

"""A deformable convolution as LLVM IR: the shifted taps of a block of positions as columns, then products of their rows with the weights."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import DOUBLE, FLOAT, INT32, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.generic._lines_ir import iota
from whet.tactics.cpu.generic._loops import list_context_words

_VECTORS = 3  # of positions in a block: with _ROWS rows of results, 12 accumulators
BLOCK = _VECTORS * LANES
_ROWS = 4
PLACES = ("source", "weights", "offsets", "bias", "mask", "target", "columns")
NUMBERS = (
    "channels", "height", "width", "kernels", "rows", "across", "kernel_width", "taps", "groups", "offset_groups", "row_stride", "column_stride",
    "row_dilation", "column_dilation", "top", "left", "blocks", "stride",
)  # fmt: skip


@cache
def emit_deform_conv_ir(has_bias: bool, has_mask: bool) -> str:
    """`deform_conv(context)`: one item per block of positions of a batch item. `columns` has `stride` bytes of each thread: [channels * taps, BLOCK].

    Numbers: channels and size of an image; kernels (channels of the result) and its size; taps of a kernel and those in a row of it; groups; strides,
    dilations and leading pads; blocks of positions. Positions are f64, as in the reference. Lanes after the last position repeat it.
    """
    module = Module()
    with parallel_kernel(module, "deform_conv", list_context_words(PLACES, NUMBERS), "items") as (f, w):
        rest = f.allocate(FLOAT, LANES)
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        columns = (w.columns + me * w.stride).as_pointer(FLOAT)
        with f.loop(w.begin, w.end) as items:
            item, first = items.index // w.blocks, items.index % w.blocks * BLOCK
            with f.loop(0, BLOCK, step=LANES) as vectors:
                _emit_columns(f, w, item, first + vectors.index, columns.at(vectors.index), has_mask)
            _emit_products(f, w, item, first, columns, rest, has_bias)
    return str(module)


def _emit_columns(f: Function, w: SimpleNamespace, item: Value, first: Value, columns: Pointer, has_mask: bool) -> None:
    """The taps of all channels for LANES positions, BLOCK elements apart."""
    positions = w.rows * w.across
    last = (positions - 1).convert("trunc", INT32).broadcast()
    lanes = first.convert("trunc", INT32).broadcast() + iota(f, INT32, LANES)
    position = f.select(lanes > last, last, lanes)
    across = w.across.convert("trunc", INT32).broadcast()
    row, column = (position // across).convert("sitofp", DOUBLE), (position % across).convert("sitofp", DOUBLE)
    per_group = w.channels // w.offset_groups
    source = w.source.as_pointer(FLOAT).at(item * w.channels * w.height * w.width)
    with f.loop(0, w.offset_groups) as groups, f.loop(0, w.taps) as taps:
        tap = (item * w.offset_groups + groups.index) * w.taps + taps.index
        offsets = w.offsets.as_pointer(FLOAT).at(tap * positions * 2)
        i, j = taps.index // w.kernel_width, taps.index % w.kernel_width
        v = _place(row, w.row_stride, i * w.row_dilation - w.top) + offsets.gather(position).convert("fpext", DOUBLE)
        u = _place(column, w.column_stride, j * w.column_dilation - w.left) + offsets.at(positions).gather(position).convert("fpext", DOUBLE)
        vertical, horizontal = _list_neighbours(f, v, w.height), _list_neighbours(f, u, w.width)
        scale = w.mask.as_pointer(FLOAT).at(tap * positions).gather(position) if has_mask else None
        width = w.width.convert("trunc", INT32).broadcast()
        corners = []
        for y, wy, inside_y in vertical:
            for x, wx, inside_x in horizontal:
                corners.append((y * width + x, (wy * wx).convert("fptrunc", FLOAT), inside_y & inside_x))
        with f.loop(0, per_group) as channels:
            channel = groups.index * per_group + channels.index
            image = source.at(channel * w.height * w.width)
            total = zero = f.value(0.0, Type("float", LANES))
            for index, weight, inside in corners:
                total = total + f.select(inside, image.gather(index) * weight, zero)
            columns.store(total if scale is None else total * scale, (channel * w.taps + taps.index) * BLOCK)


def _place(index: Value, stride: Value, start: Value) -> Value:
    return index * stride.convert("sitofp", DOUBLE).broadcast() + start.convert("sitofp", DOUBLE).broadcast()


def _list_neighbours(f: Function, at: Value, size: Value) -> list[tuple[Value, Value, Value]]:
    """(index, weight, whether it is inside) of the two neighbours of positions along an axis; an index outside is 0."""
    low = f.math("floor", at)
    last = (size.convert("sitofp", DOUBLE) - 1.0).broadcast()
    zero, one = f.value(0.0, at.type), f.value(1.0, at.type)
    found = []
    for place, weight in ((low, one - (at - low)), (low + 1.0, at - low)):
        inside = (place >= zero) & (last >= place)
        found.append((f.select(inside, place, zero).convert("fptosi", INT32), weight, inside))
    return found


def _emit_products(f: Function, w: SimpleNamespace, item: Value, first: Value, columns: Pointer, rest: Pointer, has_bias: bool) -> None:
    """The results of a block of positions: _ROWS kernels at once, then the others of a group one by one."""
    per_group, positions = w.kernels // w.groups, w.rows * w.across
    length = w.channels // w.groups * w.taps
    with f.loop(0, w.groups) as groups:
        own = columns.at(groups.index * length * BLOCK)

        def emit(kernel: Value, count: int) -> None:
            k = groups.index * per_group + kernel
            weights = w.weights.as_pointer(FLOAT).at(k * length)
            zero = f.value(0.0, Type("float", LANES))
            start = [zero] * (count * _VECTORS)
            if has_bias:
                start = [w.bias.as_pointer(FLOAT).at(k).load(n).broadcast() for n in range(count) for _ in range(_VECTORS)]
            with f.loop(0, length, carried=start) as depth:
                parts = [own.load_vector(depth.index * BLOCK + v * LANES) for v in range(_VECTORS)]
                scales = [weights.at(length * n).load(depth.index).broadcast() for n in range(count)]
                totals = depth.values
                depth.carry(*(f.fma(scales[n], parts[v], totals[n * _VECTORS + v]) for n in range(count) for v in range(_VECTORS)))
            for n in range(count):
                target = w.target.as_pointer(FLOAT).at((item * w.kernels + k + n) * positions + first)
                for v in range(_VECTORS):
                    _store(f, target.at(v * LANES), depth.results[n * _VECTORS + v], positions - first - v * LANES, rest)

        with f.loop(0, per_group - (_ROWS - 1), step=_ROWS) as many:
            emit(many.index, _ROWS)
        with f.loop(many.index, per_group) as one:
            emit(one.index, 1)


def _store(f: Function, target: Pointer, value: Value, count: Value, rest: Pointer) -> None:
    """Stores the first `count` lanes of a vector, all of them if there are more."""
    with f.when(count > LANES - 1):
        target.store(value)
    with f.when(f.value(LANES) > count):
        rest.store(value)
        with f.loop(0, count) as lanes:
            target.store(rest.load(lanes.index), lanes.index)

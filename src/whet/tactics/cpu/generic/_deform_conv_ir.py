"""A deformable convolution as LLVM IR: the shifted taps of a block of positions as columns, then products of their rows with the weights."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import DOUBLE, FLOAT, INT64, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.generic._loops import list_context_words
from whet.tactics.cpu.generic._pixels_ir import store_lanes, store_transposed

_VECTORS = 3  # of positions in a block: with _ROWS rows of results, 12 accumulators
BLOCK = _VECTORS * LANES
_ROWS = 4
PLACES = ("pixels", "weights", "offsets", "bias", "mask", "target", "columns")
NUMBERS = (
    "channels", "height", "width", "kernels", "rows", "across", "kernel_width", "taps", "groups", "offset_groups", "row_stride", "column_stride",
    "row_dilation", "column_dilation", "top", "left", "blocks", "stride", "pixel",
)  # fmt: skip


@cache
def emit_deform_conv_ir(has_bias: bool, has_mask: bool) -> str:
    """`deform_conv(context)`: one item per block of positions of a batch item. `columns` has `stride` bytes of each thread: [channels * taps, BLOCK],
    then LANES pixels.

    Numbers: channels and size of an image; kernels (channels of the result) and its size; taps of a kernel and those in a row of it; groups; strides,
    dilations and leading pads; blocks of positions; floats of a pixel of `pixels`. Positions are f64, as in the reference. Lanes after the last
    position repeat it.
    """
    module = Module()
    with parallel_kernel(module, "deform_conv", list_context_words(PLACES, NUMBERS), "items") as (f, w):
        rest = f.allocate(FLOAT, LANES)
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        columns = (w.columns + me * w.stride).as_pointer(FLOAT)
        tile = columns.at(w.channels * w.taps * BLOCK)
        with f.loop(w.begin, w.end) as items:
            item, first = items.index // w.blocks, items.index % w.blocks * BLOCK
            with f.loop(0, BLOCK, step=LANES) as vectors:
                _emit_columns(f, w, item, first + vectors.index, columns.at(vectors.index), tile, rest, has_mask)
            _emit_products(f, w, item, first, columns, rest, has_bias)
    return str(module)


def _emit_columns(f: Function, w: SimpleNamespace, item: Value, first: Value, columns: Pointer, tile: Pointer, rest: Pointer, has_mask: bool) -> None:
    """The taps of all channels for LANES positions, BLOCK elements apart."""
    positions = w.rows * w.across
    per_group = w.channels // w.offset_groups
    image = w.pixels.as_pointer(FLOAT).at(item * w.height * w.width * w.pixel)
    with f.loop(0, w.offset_groups) as groups, f.loop(0, w.taps) as taps:
        tap = (item * w.offset_groups + groups.index) * w.taps + taps.index
        i, j = taps.index // w.kernel_width, taps.index % w.kernel_width
        top, left = i * w.row_dilation - w.top, j * w.column_dilation - w.left
        with f.loop(0, LANES) as lanes:
            position = f.minimum(first + lanes.index, positions - 1)
            v = (position // w.across * w.row_stride + top).convert("sitofp", DOUBLE)
            u = (position % w.across * w.column_stride + left).convert("sitofp", DOUBLE)
            offsets = w.offsets.as_pointer(FLOAT).at(tap * positions * 2 + position)
            vertical = _list_neighbours(f, v + offsets.load().convert("fpext", DOUBLE), w.height)
            horizontal = _list_neighbours(f, u + offsets.load(positions).convert("fpext", DOUBLE), w.width)
            scale = w.mask.as_pointer(FLOAT).load(tap * positions + position).broadcast() if has_mask else None
            corners = []
            for y, wy, inside_y in vertical:
                for x, wx, inside_x in horizontal:
                    pixel = image.at((y * w.width + x) * w.pixel + groups.index * per_group)
                    corners.append((pixel, (wy * wx).convert("fptrunc", FLOAT).broadcast(), (inside_y & inside_x).broadcast()))
            with f.loop(0, per_group, step=LANES) as channels:
                total = zero = f.value(0.0, Type("float", LANES))
                for pixel, weight, inside in corners:
                    total = total + f.select(inside, pixel.load_vector(channels.index) * weight, zero)
                tile.store(total if scale is None else total * scale, lanes.index * w.pixel + channels.index)
        target = columns.at((groups.index * per_group * w.taps + taps.index) * BLOCK)
        store_transposed(f, tile, w.pixel, target, w.taps * BLOCK, per_group, f.value(LANES), rest)


def _list_neighbours(f: Function, at: Value, size: Value) -> list[tuple[Value, Value, Value]]:
    """(index, weight, whether it is inside) of the two neighbours of a position along an axis; an index outside is 0."""
    low = f.math("floor", at)
    last = size.convert("sitofp", DOUBLE) - 1.0
    zero, one = f.value(0.0, DOUBLE), f.value(1.0, DOUBLE)
    found = []
    for place, weight in ((low, one - (at - low)), (low + 1.0, at - low)):
        inside = (place >= zero) & (last >= place)
        found.append((f.select(inside, place, zero).convert("fptosi", INT64), weight, inside))
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
                    store_lanes(f, target.at(v * LANES), depth.results[n * _VECTORS + v], positions - first - v * LANES, rest)

        with f.loop(0, per_group - (_ROWS - 1), step=_ROWS) as many:
            emit(many.index, _ROWS)
        with f.loop(many.index, per_group) as one:
            emit(one.index, 1)

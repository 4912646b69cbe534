"""Convolutions, products with constant matrices, and poolings of channels-last values as LLVM IR, by tables of addresses.

For each pixel of a block of results, and each tap of its window, a table has the address of the input pixel (of a line of zeros outside the image).
The kernels read pixels through the table alone, so that one kernel serves all windows, strides, dilations and pads, and a matrix is an image with
windows of one pixel. (Dukhan 2019, "The Indirect Convolution Algorithm".) The table of a block is written once and read for all output channels.

    product       rows x vectors accumulators: a value of each pixel is broadcast, and multiplied by a strip of output channels
    channelwise   the same accumulators, of one input channel each: depthwise convolutions
    mean, max     without weights

Values are f32, or 8-bit integers whose products are added in 32 bits (_llvm/byte_product.py) and rescaled as floats.

Packed weights are [strip][tap][channel][column] (channelwise: [strip][tap][column]), of integers [strip][tap][element][column][channel of the
element]; then per strip the biases (of integers: initial accumulators, factors, biases), the parameters of the result (HEADER), and an input pixel
of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np

from whet.tactics.cpu._llvm.builder import FLOAT, INT8, INT16, INT32, INT64, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.byte_product import ByteProduct
from whet.tactics.cpu._llvm.epilogue import Step, emit_chain
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, Parameter, to_int8
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel

_LINE = 16  # floats of a cache line
_ADDRESSED = 6  # addresses of pixels in registers
UNROLLED = 4  # input channels, or elements of several 8-bit ones
HEADER = 6
"""Parameters of an integer result (1 / scale, zero point, lowest and highest integer), and of an integer addend (scale, value of integer 0)."""
MEAN_PART = 128  # values that are summed at once: the rounding error of a mean of n values grows with n / 128 instead of n
_ADDRESSES = ("source", "target", "scratch")
_SIZES = (
    "x_sample", "x_row", "x_pixel", "height", "width", "stride_y", "stride_x", "step_y", "step_x", "pad_top", "pad_left", "window_y", "window_x",
    "channels", "image_rows", "image_columns", "pixels", "block", "blocks", "y_pixel", "strips", "group_strips", "item_strips", "group_channels",
    "bias", "header", "zeros", "thread_bytes", "items",
)  # fmt: skip
"""Strides of the input in values; its size; strides, dilations, pads and size of the window; input channels of a group; size of the result; all its
pixels, those of a block, and the blocks; values from one result pixel to the next; strips of output channels, those of a group, and those of an item;
output channels of a group; offsets in bytes of biases, parameters of the result, and zeros; bytes of a thread's memory."""


_VOLUME_SIZES = ("depth", "x_slice", "stride_z", "step_z", "pad_front", "window_z", "image_slices")
"""With a third axis before rows and columns: its size, and the stride of the input in values; stride, dilation, pad and size of the window; size of
the result."""
_PLACE_SIZES = ("y_sample", "y_slice", "y_row", "y_column", "y_first")
"""With results at a distance from each other: strides in values, and the first one's offset."""


@dataclass(frozen=True)
class Form:
    """The compile-time parameters of a kernel: `kind` is "product", "channelwise", "mean", "padded_mean" or "max"; `tail` are the output channels of
    a group that do not fill a vector."""

    kind: str
    lanes: int
    vectors: int  # of a strip
    rows: tuple[int, ...]  # the numbers of pixels that are computed at once
    tail: int
    steps: tuple[Step, ...] = ()
    is_plain: bool = False  # windows of one pixel without pads
    is_gathered: bool = False  # a product whose windows are first copied, so that few channels are multiplied without a loop for each tap
    source: str = "f32"  # stored types of the input, the result and the addend: "f32", "i8" or "u8"
    stored: str = "f32"
    added: str = "f32"
    instruction: str = ""  # of products of integers
    rest: int = 0  # channels of a product of integers after the last whole element
    is_volume: bool = False  # images have a third axis
    is_placed: bool = False  # results of adjacent pixels are not adjacent in memory
    is_dense: bool = False  # a product whose pixels are at equal distances: a matrix, or windows of one pixel without strides
    prefetched: int = 0  # cache lines of the next strip's weights per iteration of a product, which reads UNROLLED channels

    @property
    def width(self) -> int:
        """Output channels of a strip."""
        return self.vectors * self.lanes

    @property
    def most_rows(self) -> int:
        return count_rows(self.lanes, self.is_dense)

    @property
    def iteration_lines(self) -> int:
        """Cache lines of weights that an iteration of a dense product of f32 reads."""
        return UNROLLED * self.width // _LINE

    @property
    def reads_channels(self) -> bool:
        """True if every output channel reads all input channels of its group."""
        return self.kind == "product"

    @property
    def is_integer(self) -> bool:
        """True if the input has 8-bit integers."""
        return self.source != "f32"

    @property
    def element(self) -> Type:
        """The type of an input value in memory."""
        return _find_type(self.source)

    @property
    def accumulator(self) -> Type:
        return INT32 if self.is_integer else FLOAT

    @property
    def byte_product(self) -> ByteProduct:
        """How a product of integers is computed."""
        return ByteProduct(self.instruction, self.lanes, self.source == "i8")

    @property
    def depth(self) -> int:
        """Input channels of an element of a product."""
        return self.byte_product.depth if self.instruction else 1

    @property
    def lines(self) -> int:
        """Values per output channel after the weights: the bias, or initial accumulator, factor and bias."""
        return 3 if self.is_integer else 1


def count_rows(lanes: int, is_dense: bool) -> int:
    """The pixels that are computed at once. AVX-512 has registers for twelve, but only dense pixels have addresses for as many."""
    return 2 * _ADDRESSED if is_dense and lanes == 16 else _ADDRESSED


def list_context_words(form: Form) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    added = ["added"] if any(s.reads_residual for s in form.steps) else []
    more = (*(_VOLUME_SIZES if form.is_volume else ()), *(_PLACE_SIZES if form.is_placed else ()))
    return (*_ADDRESSES, *added, *_SIZES, *more, *LAST_WORDS)


def _find_type(name: str) -> Type:
    return FLOAT if name == "f32" else INT8


def _widen(value: Value, source: str, to: Type) -> Value:
    """8-bit integers of a stored type in longer ones."""
    return value.convert("sext" if source == "i8" else "zext", to)


def count_thread_bytes(form: Form, block: int, taps: int, channels: int) -> int:
    """A thread's memory: the table of a block, the number of taps inside the image for each pixel, the accumulators of a tile, copied windows."""
    return 8 * block * (taps + 1) + 4 * form.most_rows * form.width + (form.element.bytes * block * taps * channels if form.is_gathered else 0)


@cache
def emit_indirect_ir(form: Form) -> str:
    """`indirect(context)`."""
    module = Module()
    sums = {(r, partial): _emit_sums(module, form, r, partial) for r in form.rows for partial in _list_partials(form)}
    finish = {masked: _finish(module, form, masked) for masked in (False, True) if form.tail or not masked}
    with parallel_kernel(module, "indirect", list_context_words(form), "items") as (f, w):
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        memory = w.scratch + me * w.thread_bytes
        taps = _count_taps(w, form)
        table = memory.as_pointer(INT64)
        counts = table.at(w.block * taps)
        buffer = (memory + w.block * (taps + 1) * 8).as_pointer(form.accumulator)
        with f.loop(w.begin, w.end) as items:
            first = (items.index % w.blocks) * w.block
            count = f.minimum(w.pixels - first, w.block)
            _write_table(f, w, form, table, counts, first, count)
            if form.is_gathered:
                _gather(f, w, form, table, buffer.at(form.most_rows * form.width).as_integer(), count, taps)
            strip_begin = (items.index // w.blocks) * w.item_strips
            with f.loop(strip_begin, f.minimum(strip_begin + w.item_strips, w.strips)) as strips:
                _compute_strip(f, w, form, sums, finish, strips.index, (table, counts, buffer), (first, count))
    return str(module)


def _list_partials(form: Form) -> tuple[bool, ...]:
    """Whether there are sums of all vectors of a strip, and of the last strip of a group: a product reads no input by vectors."""
    return (False,) if form.reads_channels else (False, True)


def _write_table(f: Function, w: SimpleNamespace, form: Form, table: Pointer, counts: Pointer, first: Value, count: Value) -> None:
    """The addresses [tap][pixel] of a block. `counts` [pixel]: the number of taps inside the image, or the offset of the result, where it is placed.
    """
    nbytes = form.element.bytes
    sides = [*([w.image_slices] if form.is_volume else []), w.image_rows, w.image_columns]
    place = [first]  # sample, slice, row, column
    for side in reversed(sides):
        place = [place[0] // side, place[0] % side, *place[1:]]
    with f.loop(0, count, carried=place) as pixels:
        sample, *slices, row, column = pixels.values
        top, left = row * w.stride_y - w.pad_top, column * w.stride_x - w.pad_left
        image = w.source + (sample * w.x_sample + top * w.x_row + left * w.x_pixel) * nbytes
        if form.is_placed:
            offset = w.y_first + sample * w.y_sample + row * w.y_row + column * w.y_column
            counts.store(offset + slices[0] * w.y_slice if slices else offset, pixels.index)
        if form.is_plain and not slices:
            table.store(image, pixels.index)
            if not form.is_placed:
                counts.store(1, pixels.index)
        else:
            start = [f.value(0), f.value(0)]
            if slices:
                front = slices[0] * w.stride_z - w.pad_front
                with f.loop(0, w.window_z, carried=[*start, front, image + front * w.x_slice * nbytes]) as through:
                    *found, z, plane = through.values
                    inside = (z >= 0) & (z < w.depth)
                    found = _write_window(f, w, form, table, pixels.index, found, inside, top, left, plane)
                    through.carry(*found, z + w.step_z, plane + w.step_z * w.x_slice * nbytes)
                inside_count = through.results[1]
            else:
                _, inside_count = _write_window(f, w, form, table, pixels.index, start, None, top, left, image)
            if form.kind == "mean":
                counts.store(inside_count, pixels.index)
        following = [column + 1]
        for side, outer in zip(reversed(sides), [row, *reversed(slices), sample], strict=True):
            ends = following[0] >= side
            following = [outer + ends.convert("zext", outer.type), f.select(ends, f.value(0), following[0]), *following[1:]]
        pixels.carry(*following)


def _write_window(
    f: Function, w: SimpleNamespace, form: Form, table: Pointer, pixel: Value, found: Sequence[Value], slice_inside: Value | None, top: Value,
    left: Value, image: Value,
) -> list[Value]:  # fmt: skip
    """The addresses of the rows and columns of a pixel's window, the first one at `image`. `found`, and returned: the next tap, and the number of
    taps inside the image."""
    nbytes = form.element.bytes
    zeros, pitch = w.packed + w.zeros, w.x_pixel * nbytes
    with f.loop(0, w.window_y, carried=[*found, top, image]) as down:
        tap, inside_count, y, line = down.values
        row_inside = (y >= 0) & (y < w.height)
        row_inside = row_inside if slice_inside is None else slice_inside & row_inside
        with f.loop(0, w.window_x, carried=[tap, inside_count, left, line]) as across:
            tap, inside_count, x, address = across.values
            inside = row_inside & (x >= 0) & (x < w.width)
            table.store(f.select(inside, address, zeros), tap * w.block + pixel)
            across.carry(tap + 1, inside_count + inside.convert("zext", tap.type), x + w.step_x, address + w.step_x * pitch)
        down.carry(*across.results[:2], y + w.step_y, line + w.step_y * w.x_row * nbytes)
    return down.results[:2]


def _count_taps(w: SimpleNamespace, form: Form) -> Value:
    taps = w.window_y * w.window_x
    return taps * w.window_z if form.is_volume else taps


def _gather(f: Function, w: SimpleNamespace, form: Form, table: Pointer, patches: Value, count: Value, taps: Value) -> None:
    """Copies the values of each pixel's window to `patches` [pixel][tap][channel], whose addresses become those of the first tap."""
    with f.loop(0, count, carried=[patches]) as pixels:
        (patch,) = pixels.values
        with f.loop(0, taps, carried=[patch]) as tap:
            (at,) = tap.values
            source, target = (p.as_pointer(form.element) for p in (table.load(tap.index * w.block + pixels.index), at))
            with f.loop(0, w.channels) as c:
                target.store(source.load(c.index), c.index)
            tap.carry(at + w.channels * form.element.bytes)
        table.store(patch, pixels.index)
        pixels.carry(tap.results[0])


def _compute_strip(
    f: Function, w: SimpleNamespace, form: Form, sums: dict[tuple[int, bool], Function], finish: dict[bool, Function], strip: Value,
    memory: tuple[Pointer, Pointer, Pointer], block: tuple[Value, Value],
) -> None:  # fmt: skip
    """The results of a block of pixels for one strip of output channels."""
    (table, counts, buffer), (first, count) = memory, block
    taps = _count_taps(w, form)
    group, in_group = strip // w.group_strips, (strip % w.group_strips) * form.width
    channel = group * w.group_channels + in_group
    read = (f.value(1), taps * w.channels) if form.is_gathered else (taps, w.channels)
    strip_size = read[0] * ((read[1] + (form.depth - 1)) // form.depth * form.depth) * form.width if form.reads_channels else taps * form.width
    weights = w.packed.as_pointer(form.element).at(strip * strip_size)
    bias, header = (w.packed + w.bias).as_pointer(FLOAT).at(strip * (form.lines * form.width)), (w.packed + w.header).as_pointer(FLOAT)
    offset = group * w.channels if form.reads_channels else channel  # values from a pixel's address
    left = w.group_channels - in_group  # output channels
    target = w.target.as_pointer(_find_type(form.stored))
    added = w.added.as_pointer(_find_type(form.added)) if any(s.reads_residual for s in form.steps) else target
    chunks = (count + (form.most_rows - 1)) // form.most_rows
    least, longer = count // chunks, count % chunks
    with f.loop(0, chunks, carried=[f.value(0)]) as chunk:
        (pixel,) = chunk.values
        rows = least + (chunk.index < longer).convert("zext", pixel.type)
        following = weights.at(strip_size)
        if form.prefetched:  # each tile prefetches a part
            parts = form.iteration_lines // form.prefetched
            following = following.at((first + pixel) // form.most_rows % parts * (strip_size // parts))
        for (r, partial), function in sums.items():
            whole = left >= form.width
            condition = rows.equals(r)
            if not form.reads_channels:
                condition = condition & (whole ^ 1 if partial else whole)
            with f.when(condition):
                f.call(function, table.at(pixel), w.block, read[0], offset, weights, buffer, read[1], left, w.x_pixel, following)
        at = channel if form.is_placed else (first + pixel) * w.y_pixel + channel
        for k in range(form.vectors):
            y_at, sums_at = at + k * form.lanes, buffer.at(k * form.lanes)
            operands = sums_at, bias.at(k * form.lanes), header, counts.at(pixel), taps, target.at(y_at), added.at(y_at)
            with f.when(left >= (k + 1) * form.lanes):
                f.call(finish[False], *operands, rows, w.y_pixel)
            if form.tail:
                with f.when((left > k * form.lanes) & (left < (k + 1) * form.lanes)):
                    f.call(finish[True], *operands, rows, w.y_pixel)
        chunk.carry(pixel + rows)


def _emit_sums(module: Module, form: Form, rows: int, partial: bool) -> Function:
    """`sums_R(table, block, taps, offset, weights, buffer, channels, left, pitch, following)` writes the accumulators [row][column] of R pixels and
    a strip. `offset` values are added to the addresses. `partial`: only `left` channels of the strip exist, which the kernel may read. `pitch`:
    values from one pixel to the next. `following`: weights to be prefetched."""
    parameters = ["i64*", "i64", "i64", "i64", f"{form.element}*", f"{form.accumulator}*", "i64", "i64", "i64", f"{form.element}*"]
    with module.function(f"sums_{rows}{'_part' if partial else ''}", parameters) as f:
        sums = _emit_product_sums(f, form, rows) if form.reads_channels else _emit_channel_sums(f, form, rows, partial)
        buffer = f.arguments[5]
        assert isinstance(buffer, Pointer)
        for r in range(rows):
            for k in range(form.vectors):
                buffer.store(sums[r * form.vectors + k], r * form.width + k * form.lanes)
    return f


def _emit_product_sums(f: Function, form: Form, rows: int) -> list[Value]:
    """Few rows have several accumulators per result, for consecutive channels: an accumulator takes four cycles from one sum to the next. Of many
    rows, the second half is addressed by the first half's registers and a second index."""
    table, block, taps, offset, weights, _, channels, _, pitch, following = f.arguments
    assert isinstance(table, Pointer)
    assert isinstance(weights, Pointer)
    assert isinstance(following, Pointer)
    lanes, width, vectors, depth = form.lanes, form.width, form.vectors, form.depth
    zero = f.value(0, Type(form.accumulator.element, lanes))
    parts = 4 if rows == 1 else 2 if rows == 2 else 1

    half = pitch * _ADDRESSED if rows > _ADDRESSED else None

    def accumulate(bases: Sequence[Pointer], c: Value, w_now: Pointer, count: int, sums: Sequence[Value], present: int | None = None) -> list[Value]:
        """Adds `count` elements of the channels from `c` on."""
        sums = list(sums)
        indices = [c] if half is None else [c, f.opaque(c + half)]
        pixels = [p.at(index) for index in indices for p in bases][:rows]
        # vectors of four lanes: one load for four channels, as instructions of ARM multiply by one lane of a vector
        loaded = [_load_elements(f, form, p, count, present) for p in pixels] if lanes == 4 else []
        for u in range(count):
            part = (u % parts) * rows * vectors
            columns = [_load_weights(form, w_now, (u * width + k * lanes) * depth) for k in range(vectors)]
            for r in range(rows):
                number = loaded[r][u] if loaded else _load_elements(f, form, pixels[r].at(u * depth), 1, present)[0]
                for k in range(vectors):
                    i = part + r * vectors + k
                    sums[i] = form.byte_product.add(f, sums[i], number, columns[k]) if form.is_integer else f.fma(number, columns[k], sums[i])
                f.scheduling_barrier()
        return sums

    unit = UNROLLED * depth
    unrolled, whole = channels - channels % unit, channels - form.rest
    with f.loop(0, taps, carried=[f.value(0), *[zero] * (parts * rows * vectors)]) as tap:
        line = table.at(tap.index * block)
        pixels = [line.load(r).as_pointer(form.element).at(offset) for r in range(min(rows, _ADDRESSED))]
        with f.loop(0, unrolled, step=unit, carried=tap.values) as many:
            w_at, *sums = many.values
            w_now, c = f.opaque_pointer(weights.at(w_at)), f.opaque(many.index)
            for k in range(form.prefetched):
                following.at(c * (form.prefetched * _LINE // UNROLLED)).prefetch(k * _LINE, to_second_cache=True)
            many.carry(w_at + unit * width, *accumulate(pixels, c, w_now, UNROLLED, sums))
        with f.loop(unrolled, whole, step=depth, carried=many.results) as rest:
            w_at, *sums = rest.values
            rest.carry(w_at + depth * width, *accumulate(pixels, rest.index, weights.at(w_at), 1, sums))
        w_at, *sums = rest.results
        if form.rest:
            sums = accumulate(pixels, whole, weights.at(w_at), 1, sums, form.rest)
            w_at = w_at + depth * width
        tap.carry(w_at, *sums)
    sums = tap.results[1:]
    size = rows * vectors
    total = sums[:size]
    for p in range(1, parts):
        total = [a + b for a, b in zip(total, sums[p * size : (p + 1) * size], strict=True)]
    return total


def _load_elements(f: Function, form: Form, x: Pointer, count: int, present: int | None) -> list[Value]:
    """`count` elements at an address, each in all lanes; `present`: the channels of the only element that exist."""
    if form.is_integer:
        return form.byte_product.load(f, x, count, present)
    if count == 1:
        return [x.load().broadcast(form.lanes)]
    loaded = x.load(0, count)
    return [f.shuffle(loaded, loaded, [u] * form.lanes) for u in range(count)]


def _load_weights(form: Form, weights: Pointer, offset: int) -> Value:
    return form.byte_product.load_weights(weights, offset) if form.is_integer else weights.load(offset, form.lanes)


def _emit_channel_sums(f: Function, form: Form, rows: int, partial: bool) -> list[Value]:
    table, block, taps, offset, weights, _, _, left, *_ = f.arguments
    assert isinstance(table, Pointer)
    assert isinstance(weights, Pointer)
    lanes, vectors = form.lanes, form.vectors
    start = f.value(find_border(form.kind, form.source), Type(form.element.element, lanes))
    initial = _widen(start, form.source, INT32) if form.is_integer else start
    mask = [k < form.tail for k in range(lanes)]
    math = Math(f)

    def read(pixel: Pointer, k: int) -> Value:
        at = pixel.at(k * lanes)
        if not partial:
            return at.load(0, lanes)
        cases: list[tuple[Value | None, Callable[[], list[Value]]]] = [(left >= (k + 1) * lanes, lambda: [at.load(0, lanes)])]
        if form.tail:
            cases.append((left > k * lanes, lambda: [at.load_masked(mask, start)]))
        return f.choose([*cases, (None, lambda: [start])])[0]

    def accumulate(first: Value, end: Value) -> list[Value]:
        with f.loop(first, end, carried=[initial] * (rows * vectors)) as tap:
            sums = list(tap.values)
            line = table.at(tap.index * block)
            columns = [weights.load(tap.index * form.width + k * lanes, lanes) for k in range(vectors)] if form.kind == "channelwise" else []
            for r in range(rows):
                pixel = line.load(r).as_pointer(form.element).at(offset)
                for k in range(vectors):
                    x, i = read(pixel, k), r * vectors + k
                    if form.kind != "channelwise":
                        x = _widen(x, form.source, INT32) if form.is_integer else x
                        sums[i] = sums[i] + x if form.kind != "max" else (f if form.is_integer else math).maximum(sums[i], x)
                    elif form.is_integer:  # the product of two bytes has 16 bits
                        sums[i] = sums[i] + (_widen(x, form.source, INT16) * columns[k].convert("sext", INT16)).convert("sext", INT32)
                    else:
                        sums[i] = f.fma(x, columns[k], sums[i])
                f.scheduling_barrier()
            tap.carry(*sums)
        return tap.results

    if form.kind not in ("mean", "padded_mean") or form.is_integer:
        return accumulate(f.value(0), taps)
    with f.loop(0, taps, step=MEAN_PART, carried=[initial] * (rows * vectors)) as parts:
        found = accumulate(parts.index, f.minimum(parts.index + MEAN_PART, taps))
        parts.carry(*(total + part for total, part in zip(parts.values, found, strict=True)))
    return parts.results


def find_border(kind: str, source: str) -> float:
    """The value of a maximum or of a sum before its first element."""
    return 0.0 if kind != "max" else {"f32": -np.inf, "i8": -128, "u8": 0}[source]


def _finish(module: Module, form: Form, masked: bool) -> Function:
    """`finish(buffer, bias, header, counts, taps, y, added, rows, y_pixel)` adds the bias (or divides the mean), of integers after their scaling,
    applies the epilogue, and stores one vector of each row; `masked`: only its first `tail` channels."""
    pointers = [form.accumulator, FLOAT, FLOAT, INT64, None, _find_type(form.stored), _find_type(form.added), None, None]
    with module.function(f"finish{'_tail' if masked else ''}", ["i64" if t is None else f"{t}*" for t in pointers]) as f:
        buffer, bias, header, counts, taps, y, added, rows, y_pixel = f.arguments
        assert isinstance(buffer, Pointer)
        assert isinstance(bias, Pointer)
        assert isinstance(header, Pointer)
        assert isinstance(counts, Pointer)
        assert isinstance(y, Pointer)
        assert isinstance(added, Pointer)
        lanes = form.lanes
        mask = [k < form.tail for k in range(lanes)]
        lines = [bias.load(n * form.width, lanes) for n in range(form.lines)] if form.is_integer or form.kind in ("product", "channelwise") else []
        parameters = [Parameter(x, x.broadcast(lanes)) for x in (header.load(k) for k in range(HEADER))] if form.is_integer else []
        reads_residual = any(s.reads_residual for s in form.steps)
        is_mean = form.kind in ("mean", "padded_mean")
        with f.loop(0, rows) as row:
            value = buffer.load(row.index * form.width, lanes)
            at = counts.load(row.index) if form.is_placed else row.index * y_pixel
            if form.is_integer and form.kind != "max":
                value = (value + lines[0].convert("bitcast", INT32)).convert("sitofp", FLOAT)
            if is_mean:
                number = taps if form.kind == "padded_mean" else counts.load(row.index)
                value = value / number.convert("sitofp", FLOAT).broadcast(lanes)
            if form.kind != "max" and lines:
                value = f.fma(value, *lines[1:]) if form.is_integer else value + lines[0]
            residual = None
            if reads_residual:
                line = added.at(at)
                residual = line.load_masked(mask, f.value(0, Type(line.type.element, lanes))) if masked else line.load(0, lanes)
                if form.added != "f32":
                    residual = f.fma(_widen(residual, form.added, INT32).convert("sitofp", FLOAT), *(p.vector for p in parameters[4:]))
            value = emit_chain(f, form.steps, value, residual)
            if form.stored != "f32":
                value = value.convert("trunc", INT8) if form.kind == "max" else to_int8(f, value * parameters[0].vector, *parameters[1:4])
            if masked:
                y.at(at).store_masked(value, mask)
            else:
                y.at(at).store(value)
    return f

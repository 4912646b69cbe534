"""Winograd convolution F(m, 3) as LLVM IR: input transform, products and output transform of one block of tiles after another.

A tile is m x m results, from n x n input values with n = m + 2. The transformed input V, the products M and the transformed weights U have n * n
matrices each, with the index xi:

    V [xi][block of channels][tile][channel]           "lanes" channels per block; the pitch of a block is the largest block of tiles
    U [panel][xi][strip][channel][column]              a panel is "panel_strips" strips of "width" output channels; then the biases
    M [xi][strip][tile][column]

With raw weights, the kernel reads the weights W as they are and transforms them in a buffer of the thread:

    W [strip][channel][tap][column]                    9 values instead of n * n; a panel is one strip; then the biases
    U [xi of two rows][channel of a block][column]     a buffer that stays in L1: two rows of matrices and one block of input channels at a time

The products are then added to M, block by block, and W of the next strip is prefetched meanwhile. Few tiles are multiplied in less time than it takes
to read transformed weights from memory: for 512 channels 16.8 MB for F(2, 3) and 37.7 for F(4, 3), W only 9.4.

A block of tiles keeps V in L2, while all panels of U are multiplied with it; M of a panel is transformed to results while it is in L2. With one block
of tiles per thread (`winograd`) each thread reads all of U. In the split form, `inputs` transforms all tiles, and the threads of `products` share the
panels, so that U is read once. Each thread can have its own copy of V, which is computed again, but is in the thread's L2.

Windows that extend past the image, and the last channels if they do not fill a vector, are first copied to a buffer with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.conv._winograd_transform import (
    TAPS,
    count_tile_inputs,
    emit_input,
    emit_output,
    emit_weight_rows,
    emit_weights,
    list_row_groups,
)  # fmt: skip

VECTORS = 2  # of a strip of output channels
LINE = 16  # floats of a cache line
MOST_CHUNKS = 4
MOST_PREFETCHING = 16  # chunks of the form by matrices whose number changes the code
OUTPUT_TILES = 8  # of an item of `outputs`
_ADDRESSES = ("source", "packed", "target", "scratch")
_SIZES = (
    "x_pixel", "x_row", "x_block", "x_sample", "height", "width", "pad_top", "pad_left", "y_pixel", "y_row", "y_block", "y_sample", "rows", "columns",
    "tiles_across", "tiles_of_image", "tiles", "blocks", "capacity", "channel_blocks", "whole_blocks", "strips", "panels", "panel_strips",
    "whole_vectors", "v_pitch", "m_pitch", "u_pitch", "block_floats", "thread_floats", "bias", "group", "groups", "copies", "block", "items", "share",
)  # fmt: skip
"""Strides in floats of input and result; padding; tiles; blocks of tiles, and the tiles of the largest; blocks of input channels, and how many fill a
vector; strips and panels of output channels; result vectors without a mask; strides in floats of V, M and the buffer of U,
of a block's V, and of a thread's memory; offset of the biases; channel blocks of an item of `inputs`, and items per tile; copies of V; the block of
tiles of the launch in the form by matrices."""


def list_context_words(steps: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    return (*_ADDRESSES, *(["added"] if "Add" in steps else []), *_SIZES)


@dataclass(frozen=True)
class Form:
    """The compile-time parameters of a kernel. `tails` are the channels of the last vector of input and result, 0 if they fill it."""

    m: int
    lanes: int  # of a vector
    rows: tuple[int, ...]  # the numbers of tiles that are multiplied at once
    tails: tuple[int, int]
    steps: tuple[str, ...]  # the epilogue: "Silu", "Relu", "Add" (of an image as large as the result); each once at most
    has_avx512dq: bool
    is_split: bool
    chunks: int = 0  # into which the tiles of a matrix are divided; the next strip's weights are prefetched meanwhile. 0: no prefetches
    is_by_matrix: bool = False  # one launch each for inputs, matrices and outputs

    @property
    def is_raw(self) -> bool:
        """True if the kernel transforms the weights."""
        return self.chunks > 0 and not self.is_by_matrix

    @property
    def product_prefetches(self) -> int:
        """Cache lines of weights that are prefetched while a block of channels is multiplied with a chunk of tiles in one of the matrices. The
        transform of raw weights takes about as long as a chunk: the more evenly prefetches are spread, the less they wait for each other."""
        if self.is_by_matrix:
            return -(-self.width * self.lanes // (LINE * self.chunks))
        return -(-self._block_lines // (count_tile_inputs(self.m) ** 2 * (self.chunks + 1))) if self.chunks else 0

    @property
    def transform_prefetches(self) -> int:
        """Cache lines that are prefetched while two rows of a channel's weights are transformed: the others."""
        left = self._block_lines - self.product_prefetches * self.chunks * count_tile_inputs(self.m) ** 2
        return max(0, -(-left // (len(list_row_groups(self.m)) * self.lanes)))

    @property
    def _block_lines(self) -> int:
        return TAPS * TAPS * self.width * self.lanes // LINE

    @property
    def width(self) -> int:
        """Output channels of a strip."""
        return VECTORS * self.lanes

    @property
    def buffer_floats(self) -> int:
        """A thread's copied window, and the transforms' intermediate values."""
        return 2 * count_tile_inputs(self.m) ** 2 * self.lanes


@cache
def emit_winograd_ir(form: Form) -> str:
    """`winograd(context)`, or `inputs(context)` and `products(context)` in the split form, or `inputs(context)`, `matrices(context)` and
    `outputs(context)` in the form by matrices."""
    module = Module()
    functions = _Functions(module, form)
    words = list_context_words(form.steps)
    if form.is_by_matrix:
        _emit_by_matrix(module, form, functions)
        return str(module)
    if not form.is_split:
        with parallel_kernel(module, "winograd", words, "items") as (f, w):
            kernel = _Kernel(f, w, form, functions)
            with f.loop(w.begin, w.end) as blocks:
                v, begin, end = kernel.memory, *kernel.get_tile_range(blocks.index)
                kernel.transform_inputs(v, begin, end, begin, f.value(0), w.channel_blocks)
                with f.loop(0, w.panels) as panels:
                    kernel.compute_panel(v, kernel.memory.at(w.block_floats), panels.index, begin, end)
        return str(module)
    with parallel_kernel(module, "inputs", words, "items") as (f, w):
        kernel = _Kernel(f, w, form, functions)
        with f.loop(w.begin, w.end) as items:
            tile, group = items.index // w.groups % w.tiles, items.index % w.groups
            copy = items.index // (w.groups * w.tiles)
            block = ((tile + 1) * w.blocks - 1) // w.tiles
            first = group * w.group
            begin = kernel.get_tile_range(block)[0]
            v, end = kernel.locate_shared_inputs(copy, block), f.minimum(first + w.group, w.channel_blocks)
            kernel.transform_inputs(v, tile, tile + 1, begin, first, end)
    with parallel_kernel(module, "products", words, "items") as (f, w):
        kernel = _Kernel(f, w, form, functions)
        with f.loop(w.begin, w.end) as items:
            panel, block = items.index // w.blocks, items.index % w.blocks
            copy = f.select(w.copies > 1, kernel.me, f.value(0))
            kernel.compute_panel(kernel.locate_shared_inputs(copy, block), kernel.memory, panel, *kernel.get_tile_range(block))
    return str(module)


def _emit_by_matrix(module: Module, form: Form, functions: _Functions) -> None:
    """The three kernels of the form by matrices, for the block of tiles `w.block`."""
    words = list_context_words(form.steps)
    with parallel_kernel(module, "inputs", words, "items") as (f, w):
        kernel = _Kernel(f, w, form, functions)
        begin, _ = kernel.get_tile_range(w.block)
        with f.loop(w.begin, w.end) as items:
            tile, first = begin + items.index // w.groups, items.index % w.groups * w.group
            kernel.transform_inputs(kernel.shared_inputs, tile, tile + 1, begin, first, f.minimum(first + w.group, w.channel_blocks))
    with parallel_kernel(module, "matrices", words, "items") as (f, w):
        kernel = _Kernel(f, w, form, functions)
        begin, end = kernel.get_tile_range(w.block)
        with f.loop(w.begin, w.end) as items:
            kernel.multiply_matrix(items.index // w.panels, items.index % w.panels, end - begin)
    with parallel_kernel(module, "outputs", words, "items") as (f, w):
        kernel = _Kernel(f, w, form, functions)
        begin, end = kernel.get_tile_range(w.block)
        with f.loop(w.begin, w.end) as items:
            first, strip = begin + items.index // w.strips * OUTPUT_TILES, items.index % w.strips
            m = kernel.shared_products.at(strip * (w.capacity * form.width) + (first - begin) * form.width)
            kernel.transform_results(m, strip, f.value(1), first, f.minimum(first + OUTPUT_TILES, end))


class _Functions:
    """The functions that the kernels call."""

    def __init__(self, module: Module, form: Form) -> None:
        self.form = form
        self.input = self._input(module)
        self.weights = [self._weights(module, group) for group in range(len(list_row_groups(form.m)))] if form.is_raw else []
        self.products = {r: self._product(module, r) for r in form.rows}
        self.output = self._output(module, "output", partial=False)
        self.part = self._output(module, "output_part", partial=True)
        self.tail = self._output(module, "output_tail", partial=True, lanes=form.tails[1]) if form.tails[1] else None

    def _input(self, module: Module) -> Function:
        """`input(x, x_row, x_pixel, v, v_pitch, buffer)` transforms a window of one vector of channels."""
        n, lanes = count_tile_inputs(self.form.m), self.form.lanes
        with module.function("input", ["float*", "i64", "i64", "float*", "i64", "float*"]) as f:
            x, x_row, x_pixel, v, v_pitch, buffer = f.arguments
            assert isinstance(x, Pointer)
            assert isinstance(v, Pointer)
            assert isinstance(buffer, Pointer)
            rows = [x.at(x_row * i) for i in range(n)]
            columns = [x_pixel * j for j in range(n)]
            for j in range(n):
                for i, value in enumerate(emit_input(f, [rows[i].load(columns[j], lanes) for i in range(n)], self.form.m)):
                    buffer.store(value, (i * n + j) * lanes)
                f.scheduling_barrier()
            target = v
            for i in range(n):
                for value in emit_input(f, [buffer.load((i * n + j) * lanes, lanes) for j in range(n)], self.form.m):
                    target.store(value)
                    target = target.at(v_pitch)
                f.scheduling_barrier()
        return f

    def _weights(self, module: Module, group: int) -> Function:
        """`weights_G(w, u, u_pitch, channels, ahead)`: two rows of transformed weights (`list_row_groups`) of one strip of output channels. Memory
        from `ahead` on is prefetched."""
        lanes, width = self.form.lanes, self.form.width
        lines = self.form.transform_prefetches
        with module.function(f"weights_{group}", ["float*", "float*", "i64", "i64", "float*"]) as f:
            w, u, u_pitch, channels, ahead = f.arguments
            assert isinstance(ahead, Pointer)
            assert isinstance(w, Pointer)
            assert isinstance(u, Pointer)
            with f.loop(0, channels, at_least_once=True) as loop:
                raw, target = w.at(loop.index * (TAPS * TAPS * width)), u.at(loop.index * width)
                next_lines = ahead.at(loop.index * (lines * LINE))
                for k in range(VECTORS):
                    for line in range(k * lines // VECTORS, (k + 1) * lines // VECTORS):
                        next_lines.prefetch(line * LINE, to_second_cache=True)
                    taps = [[raw.load((i * TAPS + j) * width + k * lanes, lanes) for i in range(TAPS)] for j in range(TAPS)]
                    columns = [emit_weight_rows(f, column, self.form.m, group) for column in taps]
                    place = target.at(k * lanes)
                    for row in zip(*columns, strict=True):
                        for value in emit_weights(f, row, self.form.m):
                            place.store(value)
                            place = place.at(u_pitch)
                        f.scheduling_barrier()
        return f

    def _product(self, module: Module, rows: int) -> Function:
        """`product_R(v, v_step, u, m, blocks, ahead)`: the products of `rows` tiles and one strip of output channels; `v_step` floats from one block
        of channels to the next. With raw weights the products are added to M, and memory from `ahead` on is prefetched."""
        lanes, width = self.form.lanes, self.form.width
        with module.function(f"product_{rows}", ["float*", "i64", "float*", "float*", "i64", "float*"]) as f:
            v, v_step, u, m, blocks, ahead = f.arguments
            assert isinstance(ahead, Pointer)
            assert isinstance(v, Pointer)
            assert isinstance(u, Pointer)
            assert isinstance(m, Pointer)
            places = [r * width + k * lanes for r in range(rows) for k in range(VECTORS)]
            zero = f.value(0.0, Type("float", lanes))
            start, begin = f.value(0), [m.load(at, lanes) if self.form.is_raw else zero for at in places]
            with f.repeat(blocks, start, start, start, *begin) as loop:
                left, v_offset, u_offset, lines, *sums = loop.values
                v_now, u_now = f.opaque_pointer(v.at(v_offset)), f.opaque_pointer(u.at(u_offset))
                prefetches = self.form.product_prefetches
                ahead_now = f.opaque_pointer(ahead.at(lines)) if prefetches else ahead
                for c in range(lanes):
                    for line in range(c * prefetches // lanes, (c + 1) * prefetches // lanes):
                        ahead_now.prefetch(line * LINE, to_second_cache=True)
                    weights = [u_now.load(c * width + k * lanes, lanes) for k in range(VECTORS)]
                    for r in range(rows):
                        number = v_now.load(r * lanes + c).broadcast(lanes)
                        for k in range(VECTORS):
                            sums[r * VECTORS + k] = f.fma(number, weights[k], sums[r * VECTORS + k])
                        f.scheduling_barrier()
                left = left - 1
                loop.repeat_if(left > 0, left, v_offset + v_step, u_offset + lanes * width, lines + prefetches * LINE, *sums)
            for at, value in zip(places, loop.results[4:], strict=True):
                m.store(value, at)
        return f

    def _output(self, module: Module, name: str, partial: bool, lanes: int = 0) -> Function:
        """`NAME(m, m_pitch, buffer, bias, y, y_row, y_pixel, added, rows, columns)` transforms the products of a tile and one vector of channels,
        and applies the epilogue. `partial`: only `rows` and `columns` of the tile are in the image, and `lanes` channels of the vector (0: all)."""
        form, n = self.form, count_tile_inputs(self.form.m)
        with module.function(name, ["float*", "i64", "float*", "float*", "float*", "i64", "i64", "float*", "i64", "i64"]) as f:
            m, m_pitch, buffer, bias, y, y_row, y_pixel, added, rows, columns = f.arguments
            assert isinstance(m, Pointer)
            assert isinstance(buffer, Pointer)
            assert isinstance(bias, Pointer)
            assert isinstance(y, Pointer)
            assert isinstance(added, Pointer)
            lines = [m.at(m_pitch * (i * n)) for i in range(n)]
            for j in range(n):
                for i, value in enumerate(emit_output(f, [lines[i].at(m_pitch * j).load(0, form.lanes) for i in range(n)], form.m)):
                    buffer.store(value, (i * n + j) * form.lanes)
                f.scheduling_barrier()
            activations = Activations(f, form.has_avx512dq, form.lanes)
            shift = bias.load(0, form.lanes)
            finish = _Finish(f, form, activations, shift, lanes)
            for i in range(form.m):
                results = emit_output(f, [buffer.load((i * n + j) * form.lanes, form.lanes) for j in range(n)], form.m)
                for j, value in enumerate(results):
                    if partial:
                        buffer.store(value, (i * n + j) * form.lanes)
                    else:
                        at = y_row * i + y_pixel * j
                        finish(value, y.at(at), added.at(at))
                f.scheduling_barrier()
            if partial:
                with f.loop(0, rows) as down, f.loop(0, columns) as across:
                    at = y_row * down.index + y_pixel * across.index
                    value = buffer.at((down.index * n + across.index) * form.lanes).load(0, form.lanes)
                    finish(value, y.at(at), added.at(at))
        return f


@dataclass(frozen=True)
class _Finish:
    """Adds the bias, applies the epilogue and stores a vector; only the first `lanes` channels if that is not 0."""

    f: Function
    form: Form
    activations: Activations
    bias: Value
    lanes: int

    def __call__(self, value: Value, y: Pointer, added: Pointer) -> None:
        mask = [k < self.lanes for k in range(self.form.lanes)] if self.lanes else None
        value = value + self.bias
        for step in self.form.steps:
            if step == "Add":
                zero = self.f.value(0.0, value.type)
                value = value + (added.load(0, self.form.lanes) if mask is None else added.load_masked(mask, zero))
            else:
                value = self.activations.silu(value) if step == "Silu" else self.activations.relu(value)
        if mask is None:
            y.store(value)
        else:
            y.store_masked(value, mask)


class _Kernel:
    """The code of an item."""

    def __init__(self, f: Function, w: SimpleNamespace, form: Form, functions: _Functions) -> None:
        self.f, self.w, self.form, self.functions = f, w, form, functions
        (self.me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        self.scratch = w.scratch.as_pointer(FLOAT)
        own = self.scratch.at(self.me * w.thread_floats)
        self.window = own  # the copied window, then the transforms' intermediate values
        self.buffer = own.at(form.buffer_floats // 2)
        self.memory = own.at(form.buffer_floats)

    def get_tile_range(self, block: Value) -> tuple[Value, Value]:
        """The range of tiles of a block."""
        w = self.w
        return block * w.tiles // w.blocks, (block + 1) * w.tiles // w.blocks

    @property
    def shared_inputs(self) -> Pointer:
        """The transformed inputs that threads share: after the memory of all threads."""
        return self.scratch.at(emit_thread_count(self.w.context) * self.w.thread_floats)

    @property
    def shared_products(self) -> Pointer:
        """M in the form by matrices: after V."""
        return self.shared_inputs.at(self.w.block_floats)

    def locate_shared_inputs(self, copy: Value, block: Value) -> Pointer:
        """V of a block in the split form: after the blocks before, in a copy."""
        w = self.w
        return self.shared_inputs.at((copy * w.blocks + block) * w.block_floats)

    def emit_for_tiles(self, begin: Value, end: Value, emit: Callable[[Value, Value, Value, Value], None]) -> None:
        """Emits code for the tiles [begin, end): emit(tile, sample, row, column), the row and column of the tile's first result."""
        f, w, m = self.f, self.w, self.form.m
        sample, of_image = begin // w.tiles_of_image, begin % w.tiles_of_image
        down, across = of_image // w.tiles_across, of_image % w.tiles_across
        with f.loop(begin, end, carried=[sample, down, across]) as tiles:
            sample, down, across = tiles.values
            emit(tiles.index, sample, down * m, across * m)
            across = across + 1
            row_ends = across.equals(w.tiles_across)
            across, down = f.select(row_ends, f.value(0), across), down + row_ends.convert("zext", across.type)
            image_ends = (down * m >= w.rows) & row_ends
            tiles.carry(sample + image_ends.convert("zext", across.type), f.select(image_ends, f.value(0), down), across)

    def transform_inputs(self, v: Pointer, begin: Value, end: Value, first: Value, channels_begin: Value, channels_end: Value) -> None:
        """V of tiles and of blocks of channels; `first` is the block's first tile."""
        f, w, n = self.f, self.w, count_tile_inputs(self.form.m)
        source = w.source.as_pointer(FLOAT)

        def transform(tile: Value, sample: Value, y: Value, x: Value) -> None:
            top, left = y - w.pad_top, x - w.pad_left
            inside = f.maximum(0 - top, top + n - w.height) > 0
            inside = (inside | (f.maximum(0 - left, left + n - w.width) > 0)) ^ 1
            image = source.at(sample * w.x_sample).at(top * w.x_row + left * w.x_pixel)
            target = v.at((tile - first) * self.form.lanes)
            step = w.capacity * self.form.lanes
            whole = f.minimum(w.whole_blocks, channels_end) if self.form.tails[0] else channels_end
            direct_end = f.select(inside, whole, channels_begin)
            with f.loop(channels_begin, direct_end) as c:
                f.call(self.functions.input, image.at(c.index * w.x_block), w.x_row, w.x_pixel, target.at(c.index * step), w.v_pitch, self.buffer)
            with f.when(direct_end < channels_end):
                self._transform_copies(image, top, left, target, step, direct_end, channels_end)

        self.emit_for_tiles(begin, end, transform)

    def _transform_copies(self, image: Pointer, top: Value, left: Value, target: Pointer, step: Value, begin: Value, end: Value) -> None:
        """The same for channels [begin, end) of a window that extends past the image, or that does not fill a vector."""
        f, w, lanes, n = self.f, self.w, self.form.lanes, count_tile_inputs(self.form.m)
        zero = f.value(0.0, Type("float", lanes))
        for k in range(n * n):
            self.window.store(zero, k * lanes)
        first_row, end_row = f.maximum(0 - top, 0), f.minimum(w.height - top, n)
        first_column, end_column = f.maximum(0 - left, 0), f.minimum(w.width - left, n)

        def copy(block: Value, load: Callable[[Pointer], Value]) -> None:
            x = image.at(block * w.x_block)
            with f.loop(first_row, end_row) as rows, f.loop(first_column, end_column) as columns:
                at = x.at(rows.index * w.x_row + columns.index * w.x_pixel)
                self.window.at((rows.index * n + columns.index) * lanes).store(load(at))

        tail = self.form.tails[0]
        with f.loop(begin, end) as c:
            if tail:
                mask = [k < tail for k in range(lanes)]
                with f.when(c.index < w.whole_blocks):
                    copy(c.index, lambda at: at.load(0, lanes))
                with f.when(c.index >= w.whole_blocks):
                    copy(c.index, lambda at: at.load_masked(mask, zero))
            else:
                copy(c.index, lambda at: at.load(0, lanes))
            f.call(self.functions.input, self.window, f.value(n * lanes), f.value(lanes), target.at(c.index * step), w.v_pitch, self.buffer)

    def compute_panel(self, v: Pointer, m: Pointer, panel: Value, begin: Value, end: Value) -> None:
        """The results of the tiles [begin, end) of a block in one panel of output channels."""
        f, w, form = self.f, self.w, self.form
        count = end - begin
        if form.is_raw:
            self._multiply_raw(v, m, panel, count)
        else:
            with f.loop(0, count_tile_inputs(form.m) ** 2) as xi:
                self._multiply_strips(v, m, panel, xi.index, count)
        self.transform_results(m, panel * w.panel_strips, self._count_strips(panel), begin, end)

    def multiply_matrix(self, xi: Value, panel: Value, count: Value) -> None:
        """The products of all `count` tiles of a block in one matrix of one panel of output channels."""
        m = self.shared_products.at(panel * self.w.panel_strips * (self.w.capacity * self.form.width))
        self._multiply_strips(self.shared_inputs, m, panel, xi, count)

    def _count_strips(self, panel: Value) -> Value:
        """Strips of a panel."""
        return self.f.minimum(self.w.strips - panel * self.w.panel_strips, self.w.panel_strips)

    def _multiply_strips(self, v: Pointer, m: Pointer, panel: Value, xi: Value, count: Value) -> None:
        """The products of `count` tiles in the matrix `xi` of the packed weights of a panel; the next strip's weights follow in memory."""
        f, w, form = self.f, self.w, self.form
        strip_floats, strips = w.channel_blocks * (form.lanes * form.width), self._count_strips(panel)
        u = w.packed.as_pointer(FLOAT).at(panel * w.panel_strips * strip_floats * count_tile_inputs(form.m) ** 2)
        with f.loop(0, strips) as strip:
            u_now = u.at((xi * strips + strip.index) * strip_floats)
            m_now = m.at(xi * w.m_pitch + strip.index * (w.capacity * form.width))
            self._multiply(v.at(xi * w.v_pitch), u_now, m_now, count, w.channel_blocks, u_now.at(strip_floats))

    def _multiply_raw(self, v: Pointer, m: Pointer, panel: Value, count: Value) -> None:
        """M of one strip of output channels: two rows of matrices at a time, in each of them block by block of input channels."""
        f, w, form, n = self.f, self.w, self.form, count_tile_inputs(self.form.m)
        block_floats = form.lanes * TAPS * TAPS * form.width
        strip_floats = w.channel_blocks * block_floats
        raw, u = w.packed.as_pointer(FLOAT).at(panel * strip_floats), m.at(w.m_pitch * (n * n))
        ahead, lines = raw.at(strip_floats), form.product_prefetches * form.chunks * LINE
        others, other_lines = ahead.at(w.channel_blocks * (n * n * lines)), form.transform_prefetches * form.lanes * LINE
        zero = f.value(0.0, Type("float", form.lanes))
        with f.loop(0, n * n) as matrices, f.loop(0, count * VECTORS) as vector:
            m.at(matrices.index * w.m_pitch + vector.index * form.lanes).store(zero)
        for group, (first_row, second_row) in enumerate(list_row_groups(form.m)):
            done = w.channel_blocks * group
            with f.loop(0, w.channel_blocks) as blocks:
                block, v_now = done + blocks.index, v.at(blocks.index * (w.capacity * form.lanes))
                operands = raw.at(blocks.index * block_floats), u, w.u_pitch, f.value(form.lanes), others.at(block * other_lines)
                f.call(self.functions.weights[group], *operands)
                with f.loop(0, 2 * n) as matrix:
                    xi = matrix.index + first_row * n + (matrix.index // n) * ((second_row - first_row - 1) * n)
                    matrix_operands = v_now.at(xi * w.v_pitch), u.at(matrix.index * w.u_pitch), m.at(xi * w.m_pitch)
                    self._multiply(*matrix_operands, count, f.value(1), ahead.at((block * (2 * n) + matrix.index) * lines))

    def _multiply(self, v: Pointer, u: Pointer, m: Pointer, count: Value, blocks: Value, ahead: Pointer) -> None:
        """The products of `count` tiles with one matrix of one strip of output channels, in `blocks` of input channels; memory from `ahead` on is
        prefetched."""
        f, w, form = self.f, self.w, self.form
        most = max(form.rows)
        chunks = (count + (most - 1)) // most
        least, longer = count // chunks, count % chunks
        with f.loop(0, chunks, carried=[f.value(0)]) as chunk:
            (tile,) = chunk.values
            rows = least + (chunk.index < longer).convert("zext", tile.type)
            ahead_now = ahead.at(chunk.index * blocks * (form.product_prefetches * LINE))
            operands = v.at(tile * form.lanes), w.capacity * form.lanes, u, m.at(tile * form.width), blocks, ahead_now
            for r in form.rows:
                with f.when(rows.equals(r)):
                    f.call(self.functions.products[r], *operands)
            chunk.carry(tile + rows)

    def transform_results(self, m: Pointer, first_strip: Value, strips: Value, begin: Value, end: Value) -> None:
        """The results of the tiles [begin, end) in `strips` strips of output channels; `m` has the products of the first tile and strip."""
        f, w, form = self.f, self.w, self.form
        target = w.target.as_pointer(FLOAT)
        added = w.added.as_pointer(FLOAT) if "Add" in form.steps else target
        bias = w.packed.as_pointer(FLOAT).at(w.bias)
        first = first_strip * VECTORS

        def transform(tile: Value, sample: Value, y: Value, x: Value) -> None:
            rows, columns = f.minimum(w.rows - y, form.m), f.minimum(w.columns - x, form.m)
            is_whole = rows.equals(form.m) & columns.equals(form.m)
            at = sample * w.y_sample + y * w.y_row + x * w.y_pixel
            product = m.at((tile - begin) * form.width)
            with f.loop(0, strips * VECTORS) as vectors:
                index = vectors.index
                m_now = product.at((index // VECTORS) * (w.capacity * form.width) + (index % VECTORS) * form.lanes)
                k = first + index
                y_at = at + k * w.y_block
                operands = (
                    m_now, w.m_pitch, self.buffer, bias.at(k * form.lanes), target.at(y_at), w.y_row, w.y_pixel, added.at(y_at), rows, columns,
                )  # fmt: skip
                within = k < w.whole_vectors
                with f.when(within & is_whole):
                    f.call(self.functions.output, *operands)
                with f.when(within & (is_whole ^ 1)):
                    f.call(self.functions.part, *operands)
                if self.functions.tail is not None:
                    with f.when(k.equals(w.whole_vectors)):
                        f.call(self.functions.tail, *operands)

        self.emit_for_tiles(begin, end, transform)

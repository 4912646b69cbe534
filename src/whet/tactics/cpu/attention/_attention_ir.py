"""Attention of a block of queries after the other, as LLVM IR: its scores, softmax and values stay in the cache of one core.

An item is a group of tiles of queries of one head. A thread packs k and v of a head once for all items of its range (_pack_ir.py), and keeps them,
the scores and the probabilities of a group in its own memory. The scores of a group are complete before their softmax, so that there is one kernel
for any number of keys.

    f32     tiles of rows x vectors accumulators: a value of each row is broadcast and multiplied by a panel (any CPU)
    bf16    pairs of AMX tiles; the softmax is f32, its result is rounded
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.network import BF16
from whet.tactics._attention import Guard
from whet.tactics.cpu._llvm.amx import CONFIG_WORDS, TILE_BYTES, TILE_ROWS, add_bf16_product, configured_tiles, load_tile, store_tile, zero_tile
from whet.tactics.cpu._llvm.builder import FLOAT, INT8, INT16, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import SmallFloatPointer, convert_to_bf16
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.attention._pack_ir import (
    Panels,
    emit_copied_panels,
    emit_copied_rows,
    emit_paired_tiles,
    emit_transposed_panels,
    load_part,
    transpose_vectors,
)
from whet.tactics.cpu.attention._softmax_ir import Keys, RowSoftmax

PAIR = 2 * TILE_ROWS  # columns and, at most, rows of a pair of AMX tiles
_UNROLLED = 4  # steps of a product in f32
_PARTS = 4  # of a thread's memory: the offsets of v, scores, probabilities, queries; k is first
_CONFIG = tuple(f"config{k}" for k in range(CONFIG_WORDS))
_OPERANDS = ("q", "k", "v", "out")
_SIZES = (
    *(f"{name}_{step}" for name in _OPERANDS for step in ("offset", "batch", "head")), "k_group", "v_group", "rows", "heads", "tiles", "groups",
    "items", "thread_bytes", *(f"part{k}" for k in range(1, _PARTS + 1)), *_CONFIG,
)  # fmt: skip
"""Bytes from an operand's address to its first element, from batch item to batch item, from head to head; consecutive heads that share one of k and
of v; queries, heads; tiles of queries, groups of them, items; bytes of a thread's memory and offsets of its parts; configuration of the AMX tiles."""
_MASK_SIZES = ("mask_offset", "mask_batch", "mask_head", "mask_row", "mask_period")
_ACCUMULATORS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)  # registers


@dataclass(frozen=True)
class Form:
    """The compile-time parameters.

    `lanes`: floats of a vector. `rows`: queries of a tile. `tiles`: of a group. `vectors`: of a panel of k and of v. `strides`: elements from row to
    row of q, k, v and the output. `turned`: keys are columns of k. `reads_keys`, `reads_values`: f32 of few queries: from k and v themselves.
    `mask`: "", "keys" (a value per key) or "row" (one value for all keys). `constant_mask`: it is the second packed operand. `causal`: the last key
    that a query sees is that of its row + `causal`. `capped`: tanh limits the scaled scores.
    """

    is_bf16: bool
    lanes: int
    rows: int
    tiles: int
    vectors: tuple[int, int]
    keys: int
    size: int
    value_size: int
    strides: tuple[int, int, int, int]
    turned: bool
    reads_keys: bool = False
    reads_values: bool = False
    mask: str = ""
    constant_mask: bool = False
    guard: Guard = Guard.NONE
    capped: bool = False
    causal: int | None = None

    @property
    def key_columns(self) -> int:
        """Scores of a query, with those after the last key."""
        return _round_up(self.keys, self.panel)

    @property
    def value_columns(self) -> int:
        return _round_up(self.value_size, PAIR if self.is_bf16 else self.vectors[1] * self.lanes)

    @property
    def panel(self) -> int:
        """Keys of a panel."""
        return PAIR if self.is_bf16 else self.vectors[0] * self.lanes

    @property
    def padded_size(self) -> int:
        """Elements of a packed key: whole tiles."""
        return _round_up(self.size, PAIR) if self.is_bf16 else self.size

    @property
    def copies_queries(self) -> bool:
        return self.padded_size != self.size

    def list_part_bytes(self) -> list[int]:
        """Bytes of k, v, scores, probabilities and queries in a thread's memory; f32 probabilities replace the scores."""
        n, bytes_ = self.rows * self.tiles, 2 if self.is_bf16 else 4
        keys = self.key_columns if self.is_bf16 else self.keys
        parts = [
            0 if self.reads_keys else self.key_columns * self.padded_size * bytes_,
            0 if self.reads_values else self.value_columns * keys * bytes_,
            n * self.key_columns * 4,
            n * self.key_columns * 2 if self.is_bf16 else 0,
            n * self.padded_size * 2 if self.copies_queries else 0,
        ]
        return [_round_up(p, 64) for p in parts]


def list_context_words(form: Form) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    mask = (("mask",) if not form.constant_mask else ()) if form.mask else ()
    sizes = _MASK_SIZES if form.mask else ()
    return (*_OPERANDS, *mask, "scratch", *_SIZES, *sizes, *LAST_WORDS, *(("constant_mask",) if form.constant_mask else ()))


@cache
def emit_attention_ir(form: Form) -> str:
    """`attention(context)`."""
    module = Module()
    body = (_TileKernel if form.is_bf16 else _VectorKernel)(module, form)
    words = list_context_words(form)
    with parallel_kernel(module, "attention", words, "items") as (f, w):
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        memory = w.scratch + me * w.thread_bytes
        parts = [memory, *(memory + getattr(w, f"part{k}") for k in range(1, _PARTS + 1))]
        body.begin(f, w, parts)
        with body.prepare(), f.loop(w.begin, w.end, carried=[f.value(0), f.value(0)]) as items:
            index, group = items.index // w.groups, items.index % w.groups
            batch, head = index // w.heads, index % w.heads
            q, out = (_locate(w, name, batch, head) for name in ("q", "out"))
            k, v = (_locate(w, name, batch, head // getattr(w, f"{name}_group")) for name in ("k", "v"))
            if form.reads_keys:
                body.k = k
            else:
                with f.when(k.differs(items.values[0])):
                    body.pack_keys(k)
            if form.reads_values:
                body.v = v
            else:
                with f.when(v.differs(items.values[1])):
                    body.pack_values(v)
            mask = None
            if form.mask:
                address = w.constant_mask if form.constant_mask else w.mask
                mask = address + w.mask_offset + batch % w.mask_period * w.mask_batch + head * w.mask_head
            body.compute(group, q, mask, out)
            items.carry(k, v)
    return str(module)


def _locate(w: SimpleNamespace, name: str, batch: Value, head: Value) -> Value:
    offset, batch_step, head_step = (getattr(w, f"{name}_{step}") for step in ("offset", "batch", "head"))
    return getattr(w, name) + offset + batch * batch_step + head * head_step


class _Kernel(ABC):
    """The parts of the kernel. `begin` is called at the start of the function. Addresses are i64; `k` and `v` are packed, unless the form says that
    they are read as they are."""

    def __init__(self, module: Module, form: Form) -> None:
        self.module, self.form = module, form

    def begin(self, f: Function, w: SimpleNamespace, parts: Sequence[Value]) -> None:
        self.f, self.w = f, w
        self.k, self.v, self.scores, self.weights, self.queries = parts
        self.softmax = RowSoftmax(f, w.packed.as_pointer(FLOAT), self.form.lanes, self.form.guard, self.form.capped)

    @abstractmethod
    def prepare(self) -> AbstractContextManager[None]:
        """A context around all items."""

    @abstractmethod
    def pack_keys(self, k: Value) -> None: ...

    @abstractmethod
    def pack_values(self, v: Value) -> None: ...

    @abstractmethod
    def compute_scores(self, tiles: tuple[Value, Value], q: Value, keys: Value) -> None:
        """Of a range of tiles and the first `keys` keys, or as many as fill the last panel."""

    @abstractmethod
    def compute_row(self, row: Value, keys: Keys, mask: Value | None) -> None:
        """The softmax of a row of the group's scores. `mask`: the address of its elements for this row."""

    @abstractmethod
    def compute_values(self, tiles: tuple[Value, Value], out: Value, keys: Value) -> None:
        """The results of a range of tiles: probabilities times values."""

    def compute(self, group: Value, q: Value, mask: Value | None, out: Value) -> None:
        """The results of a group of tiles of queries of one head."""
        f, form = self.f, self.form
        first = group * form.tiles
        tiles = first, f.minimum(first + form.tiles, self.w.tiles)
        keys = f.value(form.keys)
        if form.causal is not None:
            visible = self.get_start(tiles[1] - 1) + (form.rows + form.causal)
            keys = f.minimum((visible + (form.panel - 1)) // form.panel * form.panel, keys)
        self.compute_scores(tiles, q, keys)
        tail = form.keys % form.lanes
        lengths: list[tuple[Value | None, Keys]] = [(None, Keys(form.keys - tail, tail))]
        if form.causal is not None:
            lengths = [(keys >= form.keys, lengths[0][1]), (keys < form.keys, Keys(keys, 0))]
        for condition, length in lengths:
            with f.when(condition) if condition is not None else nullcontext():
                self._compute_rows(tiles, length, mask)
        self.compute_values(tiles, out, keys)

    def _compute_rows(self, tiles: tuple[Value, Value], keys: Keys, mask: Value | None) -> None:
        f, rows = self.f, self.form.rows
        with f.loop(*tiles) as tile:
            start, own = self.get_start(tile.index), (tile.index - tiles[0]) * rows
            with f.loop(0, rows, at_least_once=True) as row:
                self.compute_row(own + row.index, keys, None if mask is None else mask + (start + row.index) * self.w.mask_row)

    def get_start(self, tile: Value) -> Value:
        """The first query of a tile: the last tile overlaps the one before, so that all have the same rows."""
        return self.f.minimum(tile * self.form.rows, self.w.rows - self.form.rows)

    def load_mask(self, mask: Value | None) -> Pointer | Value | None:
        """The mask of a row, as its softmax takes it."""
        address = None if mask is None else mask.as_pointer(FLOAT)
        return address.load() if address is not None and self.form.mask == "row" else address


@dataclass(frozen=True)
class _Right:
    """How a product reads its right operand: floats from row to row, and those of a row that exist (None: all vectors of a panel)."""

    stride: int
    columns: int | None = None


class _VectorKernel(_Kernel):
    """Products of f32 values in vector registers."""

    def __init__(self, module: Module, form: Form) -> None:
        super().__init__(module, form)
        q_stride, k_stride, v_stride, out_stride = form.strides
        self._k = Panels(form.size, form.keys, form.vectors[0] * form.lanes, form.lanes, form.size)
        self._v = Panels(form.keys, form.value_size, form.vectors[1] * form.lanes, form.lanes, form.keys)
        if form.reads_keys:
            self._dots = self._emit_dots("dots", q_stride, k_stride, form.key_columns)
        else:
            self._pack_keys = (emit_copied_panels if form.turned else emit_transposed_panels)(module, "pack_keys", self._k)
            self._score = self._emit_product("score", form.vectors[0], q_stride, _Right(self._k.width), form.key_columns, self._k.width)
        if not form.reads_values:
            self._pack_values = emit_copied_panels(module, "pack_values", self._v)
        last = form.value_size % self._v.width
        right, last_right = _Right(self._v.width), _Right(self._v.width)
        if form.reads_values:
            right, last_right = _Right(v_stride), _Right(v_stride, last)
        self._value = self._emit_product("value", form.vectors[1], form.key_columns, right, out_stride, self._v.width)
        self._last = self._emit_product("last_value", form.vectors[1], form.key_columns, last_right, out_stride, last) if last else None

    def prepare(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pack_keys(self, k: Value) -> None:
        self.f.call(self._pack_keys, k.as_pointer(FLOAT), self.k.as_pointer(FLOAT), self.form.strides[1])

    def pack_values(self, v: Value) -> None:
        self.f.call(self._pack_values, v.as_pointer(FLOAT), self.v.as_pointer(FLOAT), self.form.strides[2])

    def compute_scores(self, tiles: tuple[Value, Value], q: Value, keys: Value) -> None:
        f, form, width = self.f, self.form, self._k.width
        scores, source = self.scores.as_pointer(FLOAT), q.as_pointer(FLOAT)
        if form.reads_keys:
            f.call(self._dots, source, self.k.as_pointer(FLOAT), scores, keys)
            return
        with f.loop(0, keys, step=width) as panels:
            panel = self.k.as_pointer(FLOAT).at(panels.index * form.size)
            with f.loop(*tiles) as tile:
                target = scores.at((tile.index - tiles[0]) * (form.rows * form.key_columns) + panels.index)
                f.call(self._score, source.at(self.get_start(tile.index) * form.strides[0]), panel, target, form.size)

    def compute_row(self, row: Value, keys: Keys, mask: Value | None) -> None:
        x = self.scores.as_pointer(FLOAT).at(row * self.form.key_columns)
        self.softmax.emit(x, x, keys, self.load_mask(mask))

    def compute_values(self, tiles: tuple[Value, Value], out: Value, keys: Value) -> None:
        f, form, p = self.f, self.form, self._v
        scores, target = self.scores.as_pointer(FLOAT), out.as_pointer(FLOAT)

        def compute_panel(function: Function, panel: Value) -> None:
            values = self.v.as_pointer(FLOAT).at(panel * (p.width if form.reads_values else p.floats))
            with f.loop(*tiles) as tile:
                left = scores.at((tile.index - tiles[0]) * (form.rows * form.key_columns))
                f.call(function, left, values, target.at(self.get_start(tile.index) * form.strides[3] + panel * p.width), keys)

        with f.loop(0, form.value_size // p.width) as panels:
            compute_panel(self._value, panels.index)
        if self._last is not None:
            compute_panel(self._last, f.value(p.count - 1))

    def _emit_product(self, name: str, vectors: int, left_stride: int, right: _Right, target_stride: int, columns: int) -> Function:
        """`name(left, right, target, steps)`: the product of the rows of a tile, `left_stride` floats apart, and a panel; its first `columns` are
        stored. Few rows have several accumulators per result."""
        rows, lanes = self.form.rows, self.form.lanes
        size = rows * vectors
        parts = max(1, min(_UNROLLED, 8 // size))
        with self.module.function(name, ["float*", "float*", "float*", "i64"]) as f:
            left, panel, target, steps = f.arguments
            assert isinstance(left, Pointer)
            assert isinstance(panel, Pointer)
            assert isinstance(target, Pointer)

            def accumulate(left: Pointer, panel: Pointer, count: int, sums: Sequence[Value]) -> list[Value]:
                sums = list(sums)
                for step in range(count):
                    line = panel.at(step * right.stride)
                    present = vectors * lanes if right.columns is None else right.columns
                    numbers = [load_part(f, line.at(k * lanes), present - k * lanes, lanes) for k in range(vectors)]
                    for r in range(rows):
                        number = left.load(r * left_stride + step).broadcast(lanes)
                        for k in range(vectors):
                            i = step % parts * size + r * vectors + k
                            sums[i] = f.fma(number, numbers[k], sums[i])
                        f.scheduling_barrier()
                return sums

            zeros = [f.value(0.0, Type("float", lanes))] * (parts * size)
            unrolled = steps - steps % _UNROLLED
            with f.loop(0, unrolled, step=_UNROLLED, carried=zeros) as many:
                a, b = f.opaque_pointer(left.at(many.index)), f.opaque_pointer(panel.at(many.index * right.stride))
                many.carry(*accumulate(a, b, _UNROLLED, many.values))
            with f.loop(unrolled, steps, carried=many.results) as rest:
                rest.carry(*accumulate(left.at(rest.index), panel.at(rest.index * right.stride), 1, rest.values))
            total = rest.results[:size]
            for part in range(1, parts):
                total = [a + b for a, b in zip(total, rest.results[part * size : (part + 1) * size], strict=True)]
            for r in range(rows):
                for k in range(vectors):
                    at, count = target.at(r * target_stride + k * lanes), columns - k * lanes
                    if count >= lanes:
                        at.store(total[r * vectors + k])
                    elif count > 0:
                        at.store_masked(total[r * vectors + k], [lane < count for lane in range(lanes)])
        return f

    def _emit_dots(self, name: str, q_stride: int, k_stride: int, target_stride: int) -> Function:
        """`name(q, k, target, keys)`: the scores of the tile's queries, without packed keys: a vector of partial sums for each of `lanes` keys, which
        are added up by a transpose. The last key stands in for keys after it."""
        form, lanes = self.form, self.form.lanes
        with self.module.function(name, ["float*", "float*", "float*", "i64"]) as f:
            q, k, target, keys = f.arguments
            assert isinstance(q, Pointer)
            assert isinstance(k, Pointer)
            assert isinstance(target, Pointer)
            whole = form.size - form.size % lanes
            with f.loop(0, keys, step=lanes) as blocks:
                lines = [k.at(f.minimum(blocks.index + i, form.keys - 1) * k_stride) for i in range(lanes)]

                def accumulate(query: Pointer, at: Value, count: int, sums: Sequence[Value], lines: Sequence[Pointer] = lines) -> list[Value]:
                    number = load_part(f, query.at(at), count, lanes)
                    return [f.fma(number, load_part(f, line.at(at), count, lanes), total) for line, total in zip(lines, sums, strict=True)]

                for r in range(form.rows):
                    query, zeros = q.at(r * q_stride), [f.value(0.0, Type("float", lanes))] * lanes
                    with f.loop(0, whole, step=lanes, carried=zeros) as elements:
                        elements.carry(*accumulate(query, elements.index, lanes, elements.values))
                    sums = elements.results
                    if form.size > whole:
                        sums = accumulate(query, f.value(whole), form.size - whole, sums)
                    sums = transpose_vectors(f, sums)
                    while len(sums) > 1:
                        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
                    target.store(sums[0], blocks.index + r * target_stride)
        return f


class _TileKernel(_Kernel):
    """Products of bf16 values by AMX tiles. A group is a pair of tiles of queries."""

    def __init__(self, module: Module, form: Form) -> None:
        super().__init__(module, form)
        self._pairs = form.padded_size // 2, form.key_columns // 2  # of values of the inner dimension, of scores and of results
        columns = form.key_columns, form.value_columns
        if form.turned:
            self._pack_keys = emit_paired_tiles(module, "pack_keys", form.size, form.keys, self._pairs[0], columns[0] // TILE_ROWS)
        else:  # pairs of values as f32
            self._pack_keys = emit_transposed_panels(module, "pack_keys", Panels(form.size // 2, form.keys, LANES, LANES, self._pairs[0]))
        self._pack_values = emit_paired_tiles(module, "pack_values", form.keys, form.value_size, self._pairs[1], columns[1] // TILE_ROWS)
        self._copy_queries = emit_copied_rows(module, "copy_queries", form.rows, form.size, form.padded_size) if form.copies_queries else None

    def begin(self, f: Function, w: SimpleNamespace, parts: Sequence[Value]) -> None:
        super().begin(f, w, parts)
        self._sums = f.allocate(FLOAT, PAIR * PAIR)
        self._config = w.context.at(list_context_words(self.form).index(_CONFIG[0])).as_integer().as_pointer(INT8)

    def prepare(self) -> AbstractContextManager[None]:
        return configured_tiles(self.f, self._config)

    def pack_keys(self, k: Value) -> None:
        stride = self.form.strides[1]
        if self.form.turned:
            self.f.call(self._pack_keys, k.as_pointer(INT16), self.k.as_pointer(INT16), stride)
        else:
            self.f.call(self._pack_keys, k.as_pointer(FLOAT), self.k.as_pointer(FLOAT), stride // 2)

    def pack_values(self, v: Value) -> None:
        self.f.call(self._pack_values, v.as_pointer(INT16), self.v.as_pointer(INT16), self.form.strides[2])

    def compute_scores(self, tiles: tuple[Value, Value], q: Value, keys: Value) -> None:
        f, form = self.f, self.form
        starts, stride = self._list_starts(tiles), form.strides[0]
        left = [q.as_pointer(INT16).at(start * stride) for start in starts]
        if self._copy_queries is not None:
            copies = [self.queries.as_pointer(INT16).at(half * form.rows * form.padded_size) for half in range(2)]
            for source, copy in zip(left, copies, strict=True):
                f.call(self._copy_queries, source, copy, stride)
            left, stride = copies, form.padded_size
        scores = self.scores.as_pointer(FLOAT)
        with f.loop(0, keys, step=PAIR) as columns:
            self._multiply(left, stride, self.k, columns.index, self._pairs[0], f.value(form.padded_size))
            for half in range(2):
                for j in range(2):
                    target = scores.at(columns.index + (half * form.rows * form.key_columns + j * TILE_ROWS))
                    store_tile(f, _ACCUMULATORS[half][j], _as_bytes(target), form.key_columns * 4)

    def compute_row(self, row: Value, keys: Keys, mask: Value | None) -> None:
        f, form = self.f, self.form
        x = self.scores.as_pointer(FLOAT).at(row * form.key_columns)
        target = self.weights.as_pointer(INT16).at(row * form.key_columns)
        if isinstance(keys.whole, int):
            for at in range(keys.whole, form.key_columns, LANES):
                target.store(f.value(0, Type("i16", LANES)), at)
        self.softmax.emit(x, SmallFloatPointer(target, BF16), keys, self.load_mask(mask))

    def compute_values(self, tiles: tuple[Value, Value], out: Value, keys: Value) -> None:
        f, form = self.f, self.form
        weights, starts = self.weights.as_pointer(INT16), self._list_starts(tiles)
        left = [weights.at(half * form.rows * form.key_columns) for half in range(2)]
        with f.loop(0, form.value_columns, step=PAIR) as columns:
            self._multiply(left, form.key_columns, self.v, columns.index, self._pairs[1], keys)
            for half in range(2):
                for j in range(2):
                    target = self._sums.at((half * TILE_ROWS) * PAIR + j * TILE_ROWS)
                    store_tile(f, _ACCUMULATORS[half][j], _as_bytes(target), PAIR * 4)
            self._store_results(starts, out, columns.index)

    def _store_results(self, starts: Sequence[Value], out: Value, column: Value) -> None:
        f, form = self.f, self.form
        whole = form.value_size // PAIR * PAIR

        def store(lanes: Sequence[int]) -> None:
            for half, start in enumerate(starts):
                target = out.as_pointer(INT16).at(start * form.strides[3] + column)
                with f.loop(0, form.rows, at_least_once=True) as rows:
                    sums = self._sums.at((rows.index + half * TILE_ROWS) * PAIR)
                    for j, count in enumerate(lanes):
                        result, at = convert_to_bf16(f, sums.load_vector(j * LANES)), target.at(rows.index * form.strides[3] + j * LANES)
                        if count == LANES:
                            at.store(result)
                        elif count > 0:
                            at.store_masked(result, [lane < count for lane in range(LANES)])

        if whole:
            with f.when(column < whole):
                store((LANES, LANES))
        if rest := form.value_size - whole:
            with f.when(column >= whole):
                store((min(rest, LANES), rest - LANES))

    def _multiply(self, left: Sequence[Pointer], stride: int, right: Value, column: Value, pairs: int, inner: Value) -> None:
        """Accumulates, in the registers, the product of two tiles of rows and 32 columns of packed tiles with `pairs` pairs each."""
        f = self.f
        tile = right.as_pointer(INT8).at(column * (pairs * TILE_BYTES // TILE_ROWS))
        for half in range(2):
            for j in range(2):
                zero_tile(f, _ACCUMULATORS[half][j])
        with f.loop(0, inner, step=PAIR) as steps:
            for j in range(2):
                load_tile(f, _RIGHT[j], tile.at(steps.index * (TILE_BYTES // 2) + j * pairs * TILE_BYTES), TILE_BYTES)
            for half in range(2):
                load_tile(f, _LEFT[half], _as_bytes(left[half].at(steps.index)), 2 * stride)
                for j in range(2):
                    add_bf16_product(f, _ACCUMULATORS[half][j], _LEFT[half], _RIGHT[j])

    def _list_starts(self, tiles: tuple[Value, Value]) -> list[Value]:
        """The first queries of the pair."""
        return [self.get_start(tiles[0] + half) for half in range(2)]


def _as_bytes(address: Pointer) -> Pointer:
    return address.as_integer().as_pointer(INT8)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step

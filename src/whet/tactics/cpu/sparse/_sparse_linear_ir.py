"""LLVM IR of rows [rows, K] times a 2:4 matrix [K, channels], f32 or bf16: weights are read compressed, 8.5 bytes for every four inputs instead of
16 in f32, and 4.5 instead of 8 in bf16. Products and sums are f32; bf16 results are rounded to nearest even.

Lanes of a vector are output channels. Four inputs are loaded into each 128-bit part of a vector; a variable vpermilps selects by the 2-bit
position of each lane the input that belongs to the lane's weight. It reads two bits per lane, so no packed position can address memory.

An item is `blocks` vectors of output channels. Its packed weights are one stream, in the order of the loads: the biases; then for every
CHUNK = 32 inputs the positions (one i32 vector per block: 2 bits for each of 16 kept weights, the first in the lowest bits) and the kept
weights (for each group of four inputs two vectors per block); then the same for the remaining groups. Biases are f32 in either type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import round_to_bf16
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

CHUNK = 32  # inputs whose positions fill one 32-bit word
GROUP = 4
KEPT = 2  # weights of a group
_SELECT = {8: "llvm.x86.avx.vpermilvar.ps.256", 16: "llvm.x86.avx512.vpermilvar.ps.512"}


@dataclass(frozen=True)
class Tiling:
    """The compile-time parameters that all kernels have.

    `lanes`: 8 (AVX2) or 16 (AVX-512). `blocks`, `rows`: vectors of channels and rows of a tile. `rest_rows`: rows after the whole tiles.
    `rest_groups`: groups of four inputs after the whole chunks. `rest_channels`: channels of the last item, 0 if all are whole.
    `steps`: the epilogue, of "Add", "Relu", "Silu" and "Gelu".
    """

    lanes: int
    blocks: int
    rows: int
    rest_rows: int
    rest_groups: int
    rest_channels: int
    steps: tuple[str, ...] = ()
    has_avx512dq: bool = False

    @property
    def unit(self) -> int:
        """Output channels of an item."""
        return self.lanes * self.blocks


@dataclass(frozen=True)
class Variant(Tiling):
    """`bf16`: type of inputs, weights, addend and results; else f32."""

    bf16: bool = False


def list_context_words(steps: Sequence[str]) -> tuple[str, ...]:
    """Names of the context's words: rows in and out and the addend, sizes of a row in and out, whole tiles of rows, whole chunks, items."""
    return ("x", "y", *(["added"] if "Add" in steps else []), "inputs", "channels", "tiles", "chunks", "items", *LAST_WORDS)


def group_words(bf16: bool) -> int:
    """32-bit words of the kept weights of a channel's group."""
    return KEPT // 2 if bf16 else KEPT


def count_item_words(inputs: int, unit: int, bf16: bool = False) -> int:
    """32-bit words of an item's packed weights."""
    groups = inputs // GROUP
    return unit * (1 + groups * group_words(bf16) + -(-groups // (CHUNK // GROUP)))


@cache
def emit_sparse_linear_ir(variant: Variant) -> str:
    """`sparse_linear(context)`."""
    module = Module()
    with parallel_kernel(module, "sparse_linear", list_context_words(variant.steps), "items") as (f, words):
        _Kernel(f, words, variant).emit()
    return str(module)


class ProductKernel(ABC):
    """The body of the function that works on some items: loops over items, tiles of rows, and chunks of inputs.

    `x` and `packed` are the inputs and the items' packed weights, a group of inputs is `group_elements` elements of `x`; per output channel an
    item has `channel_words` words before the positions and `chunk_words` words for a chunk; `rest_words` is the size of its last groups.
    """

    x: Pointer
    packed: Pointer
    group_elements: int
    channel_words: int
    chunk_words: int
    rest_words: int

    def __init__(self, f: Function, words: SimpleNamespace, variant: Tiling) -> None:
        self.f, self.w = f, words
        self.tiling = variant
        self.activations = Activations(f, variant.has_avx512dq, variant.lanes, "Gelu" in variant.steps)

    @property
    @abstractmethod
    def row_elements(self) -> Value:
        """Elements of a row of `x`."""

    @abstractmethod
    def add_groups(self, x: Pointer, stream: Pointer, groups: int, accumulators: Sequence[Value]) -> list[Value]:
        """The accumulators after some groups of four inputs."""

    @abstractmethod
    def store(self, start: Value, weights: Pointer, accumulators: Sequence[Value], channels: int) -> None:
        """Applies the epilogue and stores the first `channels` channels of a tile whose first result is element `start`."""

    def emit(self) -> None:
        f, w, v = self.f, self.w, self.tiling
        size = w.chunks * (v.unit * self.chunk_words) + (v.unit * self.channel_words + self.rest_words)
        last = w.items - 1
        with f.loop(w.begin, w.end) as items:
            weights, channel = self.packed.at(items.index * size), items.index * v.unit

            def tile(row: Value, count: int) -> None:
                accumulators = self._products(self.x.at(row * self.row_elements), weights, count)
                start = row * w.channels + channel
                if not v.rest_channels:
                    self.store(start, weights, accumulators, v.unit)
                    return
                for condition, channels in ((items.index < last, v.unit), (items.index >= last, v.rest_channels)):
                    with f.when(condition):
                        self.store(start, weights, accumulators, channels)

            with f.loop(0, w.tiles) as tiles:
                tile(tiles.index * v.rows, v.rows)
            if v.rest_rows:
                tile(w.tiles * v.rows, v.rest_rows)

    def _products(self, x: Pointer, weights: Pointer, rows: int) -> list[Value]:
        """The accumulators of `rows` rows, all blocks of a row before those of the next."""
        f, w, v = self.f, self.w, self.tiling
        initial = [weights.load(j * v.lanes, v.lanes) for j in range(v.blocks)]
        stream, groups = weights.at(v.unit * self.channel_words), CHUNK // GROUP
        elements, words = groups * self.group_elements, v.unit * self.chunk_words
        with f.loop(0, w.chunks, carried=initial * rows) as chunks:
            chunks.carry(*self.add_groups(x.at(chunks.index * elements), stream.at(f.opaque(chunks.index) * words), groups, chunks.values))
        accumulators = chunks.results
        if v.rest_groups:
            accumulators = self.add_groups(x.at(w.chunks * elements), stream.at(w.chunks * words), v.rest_groups, accumulators)
        return accumulators


class _Kernel(ProductKernel):
    """Products in f32."""

    def __init__(self, f: Function, words: SimpleNamespace, variant: Variant) -> None:
        super().__init__(f, words, variant)
        self.v = variant
        element = INT16 if variant.bf16 else FLOAT
        self.x, self.y, self.packed = words.x.as_pointer(element), words.y.as_pointer(element), words.packed.as_pointer(FLOAT)
        self.added = words.added.as_pointer(element) if "Add" in variant.steps else None
        kept = group_words(variant.bf16)
        self.group_elements, self.channel_words, self.chunk_words = GROUP, 1, 1 + CHUNK // GROUP * kept
        self.rest_words = variant.unit * (1 + kept * variant.rest_groups) if variant.rest_groups else 0

    @property
    def row_elements(self) -> Value:
        return self.w.inputs

    def add_groups(self, x: Pointer, stream: Pointer, groups: int, accumulators: Sequence[Value]) -> list[Value]:
        f, v = self.f, self.v
        sums, rows = list(accumulators), len(accumulators) // v.blocks
        positions = [stream.load(j * v.lanes, v.lanes).convert("bitcast", INT32) for j in range(v.blocks)]
        values = stream.at(v.unit)
        if v.bf16:
            values = values.as_integer().as_pointer(INT16)
        for g in range(groups):
            inputs = [self._load_four_inputs(x, r, g) for r in range(rows)]
            for k in range(KEPT):
                for j in range(v.blocks):
                    weight = _to_float(values.load(((g * KEPT + k) * v.blocks + j) * v.lanes, v.lanes))
                    for r in range(rows):
                        selected = f.call_external(_SELECT[v.lanes], weight.type, inputs[r], positions[j])
                        sums[r * v.blocks + j] = f.fma(selected, weight, sums[r * v.blocks + j])
                    positions[j] = positions[j] >> 2
            f.scheduling_barrier()
        return sums

    def _load_four_inputs(self, x: Pointer, row: int, group: int) -> Value:
        """Four inputs of a row in every 128-bit part of a vector."""
        four = _to_float(x.at(self.w.inputs * row).load(group * GROUP, GROUP))
        return self.f.shuffle(four, four, [i % GROUP for i in range(self.v.lanes)])

    def store(self, start: Value, weights: Pointer, accumulators: Sequence[Value], channels: int) -> None:
        v, activations = self.v, self.activations
        y, added = self.y.at(start), None if self.added is None else self.added.at(start)
        for i, value in enumerate(accumulators):
            row, block = divmod(i, v.blocks)
            count = min(v.lanes, channels - block * v.lanes)
            if count <= 0:
                continue
            offset = self.w.channels * row + block * v.lanes
            mask = None if count == v.lanes else [k < count for k in range(v.lanes)]
            for step in v.steps:
                if step == "Add":
                    assert added is not None
                    value = value + self._addend(added.at(offset), count, activations.zero)
                else:
                    value = {"Relu": activations.relu, "Silu": activations.silu, "Gelu": activations.gelu}[step](value)
            if v.bf16:
                self._store_bf16(y.at(offset), value, count)
            elif mask is None:
                y.store(value, offset)
            else:
                y.at(offset).store_masked(value, mask)

    def _addend(self, added: Pointer, count: int, zero: Value) -> Value:
        """The first `count` channels of the addend as f32, followed by zeros."""
        f, lanes = self.f, self.v.lanes
        if count == lanes:
            return _to_float(added.load(0, lanes))
        if not self.v.bf16:
            return added.load_masked([k < count for k in range(lanes)], zero)
        value = f.value(0, Type("i16", lanes))
        for k in range(count):
            one = added.load(k)
            value = f.emit(value.type, f"insertelement {value}, {one}, i32 {k}", value, one)
        return _to_float(value)

    def _store_bf16(self, y: Pointer, value: Value, count: int) -> None:
        """Stores the first `count` values, rounded to nearest even."""
        f = self.f
        halves = round_to_bf16(f, value)
        if count == self.v.lanes:
            y.store(halves)
            return
        for k in range(count):
            y.store(f.emit(INT16, f"extractelement {halves}, i32 {k}", halves), k)


def _to_float(value: Value) -> Value:
    """Values of bf16, given as 16-bit integers, as f32; f32 unchanged."""
    return value if value.type.element == "float" else (value.convert("zext", INT32) << 16).convert("bitcast", FLOAT)


def count_lanes(has_avx512: bool) -> int:
    """Floats of the longest vector."""
    return LANES if has_avx512 else LANES // 2

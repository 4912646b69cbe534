"""LLVM IR of rows [rows, K] times a 2:4 matrix [K, channels], f32 or bf16: weights are read compressed, 8.5 bytes for every four inputs instead of
16 in f32, and 4.5 instead of 8 in bf16. Products and sums are f32; bf16 results are rounded to nearest even.

Lanes of a vector are output channels. Four inputs are loaded into each 128-bit part of a vector; a variable vpermilps selects by the 2-bit
position of each lane the input that belongs to the lane's weight. It reads two bits per lane, so no packed position can address memory.

An item is `blocks` vectors of output channels. Its packed weights are one stream, in the order of the loads: the biases; then for every
CHUNK = 32 inputs the positions (one i32 vector per block: 2 bits for each of 16 kept weights, the first in the lowest bits) and the kept
weights (for each group of four inputs two vectors per block); then the same for the remaining groups. Biases are f32 in either type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

CHUNK = 32  # inputs whose positions fill one 32-bit word
GROUP = 4
KEPT = 2  # weights of a group
_NAN = 0x7FC0  # bf16
_SELECT = {8: "llvm.x86.avx.vpermilvar.ps.256", 16: "llvm.x86.avx512.vpermilvar.ps.512"}


@dataclass(frozen=True)
class Variant:
    """The compile-time parameters of a kernel.

    `lanes`: 8 (AVX2) or 16 (AVX-512). `blocks`, `rows`: vectors of channels and rows of a tile. `rest_rows`: rows after the whole tiles.
    `rest_groups`: groups of four inputs after the whole chunks. `rest_channels`: channels of the last item, 0 if all are whole.
    `steps`: the epilogue, of "Add", "Relu", "Silu" and "Gelu". `bf16`: type of inputs, weights, addend and results; else f32.
    """

    lanes: int
    blocks: int
    rows: int
    rest_rows: int
    rest_groups: int
    rest_channels: int
    steps: tuple[str, ...] = ()
    has_avx512dq: bool = False
    bf16: bool = False

    @property
    def unit(self) -> int:
        """Output channels of an item."""
        return self.lanes * self.blocks


def context_words(steps: Sequence[str]) -> tuple[str, ...]:
    """Names of the context's words: rows in and out and the addend, sizes of a row in and out, whole tiles of rows, whole chunks, items."""
    return ("x", "y", *(["added"] if "Add" in steps else []), "inputs", "channels", "tiles", "chunks", "items", *LAST_WORDS)


def group_words(bf16: bool) -> int:
    """32-bit words of the kept weights of a channel's group."""
    return KEPT // 2 if bf16 else KEPT


def item_words(inputs: int, unit: int, bf16: bool = False) -> int:
    """32-bit words of an item's packed weights."""
    groups = inputs // GROUP
    return unit * (1 + groups * group_words(bf16) + -(-groups // (CHUNK // GROUP)))


@cache
def sparse_linear_ir(variant: Variant) -> str:
    """`sparse_linear(context)`."""
    module = Module()
    with parallel_kernel(module, "sparse_linear", context_words(variant.steps), "items") as (f, words):
        _Kernel(f, words, variant).emit()
    return str(module)


class _Kernel:
    """The body of the function that works on some items."""

    def __init__(self, f: Function, words: SimpleNamespace, variant: Variant) -> None:
        self.f, self.w, self.v = f, words, variant

    @property
    def _chunk_words(self) -> int:
        return self.v.unit * (1 + CHUNK // GROUP * group_words(self.v.bf16))

    def emit(self) -> None:
        f, w, v = self.f, self.w, self.v
        activations = Activations(f, v.has_avx512dq, v.lanes, "Gelu" in v.steps)
        element = INT16 if v.bf16 else FLOAT
        x, y, packed = w.x.as_pointer(element), w.y.as_pointer(element), w.packed.as_pointer(FLOAT)
        added = w.added.as_pointer(element) if "Add" in v.steps else None
        rest = v.unit * (1 + group_words(v.bf16) * v.rest_groups) if v.rest_groups else 0
        size = w.chunks * self._chunk_words + (v.unit + rest)
        last = w.items - 1
        with f.loop(w.begin, w.end) as items:
            weights, channel = packed.at(items.index * size), items.index * v.unit

            def tile(row: Value, count: int) -> None:
                sums = self._products(x.at(row * w.inputs), weights, count)
                start = row * w.channels + channel
                if not v.rest_channels:
                    self._store(activations, y.at(start), None if added is None else added.at(start), sums, v.unit)
                    return
                for condition, channels in ((items.index < last, v.unit), (items.index >= last, v.rest_channels)):
                    with f.when(condition):
                        self._store(activations, y.at(start), None if added is None else added.at(start), sums, channels)

            with f.loop(0, w.tiles) as tiles:
                tile(tiles.index * v.rows, v.rows)
            if v.rest_rows:
                tile(w.tiles * v.rows, v.rest_rows)

    def _products(self, x: Pointer, weights: Pointer, rows: int) -> list[Value]:
        """The accumulators of `rows` rows, all blocks of a row before those of the next."""
        f, w, v = self.f, self.w, self.v
        biases = [weights.load(j * v.lanes, v.lanes) for j in range(v.blocks)]
        stream = weights.at(v.unit)
        chunk = self._chunk_words
        with f.loop(0, w.chunks, carried=biases * rows) as chunks:
            groups = CHUNK // GROUP
            chunks.carry(*self._groups(x.at(chunks.index * CHUNK), stream.at(f.opaque(chunks.index) * chunk), groups, chunks.values))
        sums = chunks.results
        if v.rest_groups:
            sums = self._groups(x.at(w.chunks * CHUNK), stream.at(w.chunks * chunk), v.rest_groups, sums)
        return sums

    def _groups(self, x: Pointer, stream: Pointer, groups: int, sums: Sequence[Value]) -> list[Value]:
        """The accumulators after some groups of four inputs."""
        f, v = self.f, self.v
        sums, rows = list(sums), len(sums) // v.blocks
        positions = [stream.load(j * v.lanes, v.lanes).convert("bitcast", INT32) for j in range(v.blocks)]
        values = stream.at(v.unit)
        if v.bf16:
            values = values.as_integer().as_pointer(INT16)
        for g in range(groups):
            inputs = [self._four(x, r, g) for r in range(rows)]
            for k in range(KEPT):
                for j in range(v.blocks):
                    weight = _to_float(values.load(((g * KEPT + k) * v.blocks + j) * v.lanes, v.lanes))
                    for r in range(rows):
                        selected = f.call_external(_SELECT[v.lanes], weight.type, inputs[r], positions[j])
                        sums[r * v.blocks + j] = f.fma(selected, weight, sums[r * v.blocks + j])
                    positions[j] = positions[j] >> 2
            f.scheduling_barrier()
        return sums

    def _four(self, x: Pointer, row: int, group: int) -> Value:
        """Four inputs of a row in every 128-bit part of a vector."""
        four = _to_float(x.at(self.w.inputs * row).load(group * GROUP, GROUP))
        return self.f.shuffle(four, four, [i % GROUP for i in range(self.v.lanes)])

    def _store(self, activations: Activations, y: Pointer, added: Pointer | None, sums: Sequence[Value], channels: int) -> None:
        """Applies the epilogue and stores the first `channels` channels of a tile."""
        v = self.v
        for i, value in enumerate(sums):
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
        bits = value.convert("bitcast", INT32)
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        halves = f.select(value.is_nan(), f.value(_NAN, bits.type), rounded).convert("trunc", INT16)
        if count == self.v.lanes:
            y.store(halves)
            return
        for k in range(count):
            y.store(f.emit(INT16, f"extractelement {halves}, i32 {k}", halves), k)


def _to_float(value: Value) -> Value:
    """Values of bf16, given as 16-bit integers, as f32; f32 unchanged."""
    return value if value.type.element == "float" else (value.convert("zext", INT32) << 16).convert("bitcast", FLOAT)


def lanes_of(has_avx512: bool) -> int:
    """Floats of the longest vector."""
    return LANES if has_avx512 else LANES // 2

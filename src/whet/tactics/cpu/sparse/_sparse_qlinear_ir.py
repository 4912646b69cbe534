"""LLVM IR of 8-bit rows [rows, K] times an i8 2:4 matrix [K, channels]: weights are read compressed, 2.5 bytes for every four inputs instead of 4.

Lanes of a vector are output channels. The four bytes of a group's inputs are in every lane. vpshufb selects two of them and extends them to 16 bits
with zeros, vpmaddwd multiplies them by the two kept weights and adds both products in 32 bits, so that no sum saturates. Signed inputs are
shifted by 128; the initial accumulators subtract the shift and the zero point times the sum of the weights. vpshufb reads four bits of each
control byte, of which two are masked, so no packed position can address memory.

The packed operand: HEADER words with the parameters of the result (1 / scale, zero point, lowest and highest integer); then for each item of
`blocks` vectors of output channels the initial accumulators (i32), factors and biases (f32), and for every CHUNK = 32 inputs the positions
(i32 vectors: 2 bits for the first kept weight of each of eight groups in the low half, for the second in the high half) and the kept weights of
each group (i8 pairs); then the same for the remaining groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import FLOAT, INT8, INT16, INT32, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, Parameter, to_int8
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.sparse._sparse_linear_ir import CHUNK, GROUP, ProductKernel, Tiling

HEADER = 16  # words of the packed operand before the items
PER_CHANNEL = 3  # words: accumulator, factor, bias
CHUNK_WORDS = 1 + CHUNK // GROUP // 2  # per channel: positions, and pairs of bytes
WORDS = ("x", "y", "inputs", "channels", "tiles", "chunks", "items", *LAST_WORDS)
_POSITION, _ZERO = 0x00030003, 0x80008000 - (1 << 32)  # bits of a position in each half; control bytes that give zeros
_SHUFFLE = {8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}
_MULTIPLY = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}


@dataclass(frozen=True)
class QVariant(Tiling):
    """`signed` inputs, and integer results (`stores_integers`)."""

    signed: bool = False
    stores_integers: bool = False


def count_qitem_words(inputs: int, unit: int) -> int:
    """32-bit words of an item; `unit` is even."""
    chunks, rest = divmod(inputs // GROUP, CHUNK // GROUP)
    return unit * (PER_CHANNEL + chunks * CHUNK_WORDS + (rest > 0)) + rest * unit // 2


@cache
def emit_sparse_qlinear_ir(variant: QVariant) -> str:
    """`sparse_qlinear(context)`."""
    module = Module()
    with parallel_kernel(module, "sparse_qlinear", WORDS, "items") as (f, words):
        _Kernel(f, words, variant).emit()
    return str(module)


class _Kernel(ProductKernel):
    """Products of 8-bit integers. An element of `x` is a group of four inputs."""

    group_elements, channel_words, chunk_words = 1, PER_CHANNEL, CHUNK_WORDS

    def __init__(self, f: Function, words: SimpleNamespace, variant: QVariant) -> None:
        super().__init__(f, words, variant)
        self.v = variant
        header = words.packed.as_pointer(FLOAT)
        scalars = [header.load(k) for k in range(4)] if variant.stores_integers else []
        self.result = [Parameter(s, s.broadcast(variant.lanes)) for s in scalars]
        self.position, self.zero, self.shift = (f.value(n, INT32).broadcast(variant.lanes) for n in (_POSITION, _ZERO, 0x80808080 - (1 << 32)))
        self.x, self.y = words.x.as_pointer(INT32), words.y.as_pointer(INT8 if variant.stores_integers else FLOAT)
        self.packed = words.packed.as_pointer(INT32).at(HEADER)
        self.rest_words = variant.unit + variant.rest_groups * variant.unit // 2 if variant.rest_groups else 0

    @property
    def row_elements(self) -> Value:
        return self.w.inputs // GROUP

    def add_groups(self, x: Pointer, stream: Pointer, groups: int, accumulators: Sequence[Value]) -> list[Value]:
        f, v = self.f, self.v
        sums, rows = list(accumulators), len(accumulators) // v.blocks
        positions = [stream.load(j * v.lanes, v.lanes) for j in range(v.blocks)]
        pairs = stream.at(v.unit).as_integer().as_pointer(INT8)
        for g in range(groups):
            inputs = [self._bytes(self._load_four_inputs(x, r, g)) for r in range(rows)]
            for j in range(v.blocks):
                weight = pairs.load((g * v.blocks + j) * 2 * v.lanes, 2 * v.lanes).convert("sext", INT16)
                control = self._bytes((positions[j] & self.position) | self.zero)
                for r in range(rows):
                    selected = f.call_external(_SHUFFLE[v.lanes], control.type, inputs[r], control)
                    halves = f.emit(weight.type, f"bitcast {selected} to {weight.type}", selected)
                    products = f.call_external(_MULTIPLY[v.lanes], positions[j].type, halves, weight)
                    sums[r * v.blocks + j] = sums[r * v.blocks + j] + products
                if g + 1 < groups:
                    positions[j] = positions[j] >> 2
            f.scheduling_barrier()
        return sums

    def _load_four_inputs(self, x: Pointer, row: int, group: int) -> Value:
        """Four inputs of a row in every lane, unsigned."""
        four = x.at(self.row_elements * row).load(group).broadcast(self.v.lanes)
        return self.f.emit(four.type, f"xor {four}, {self.shift.name}", four, self.shift) if self.v.signed else four

    def _bytes(self, value: Value) -> Value:
        type = Type("i8", GROUP * value.lanes)
        return self.f.emit(type, f"bitcast {value} to {type}", value)

    def store(self, start: Value, weights: Pointer, accumulators: Sequence[Value], channels: int) -> None:
        """Scales the accumulators before the epilogue."""
        f, v, y = self.f, self.v, self.y.at(start)
        floats = weights.at(v.unit).as_integer().as_pointer(FLOAT)
        functions = {"Relu": self.activations.relu, "Silu": self.activations.silu, "Gelu": self.activations.gelu}
        for i, total in enumerate(accumulators):
            row, block = divmod(i, v.blocks)
            count = min(v.lanes, channels - block * v.lanes)
            if count <= 0:
                continue
            factor, bias = (floats.load(k * v.unit + block * v.lanes, v.lanes) for k in range(2))
            value = f.fma(total.convert("sitofp", FLOAT), factor, bias)
            for step in v.steps:
                value = functions[step](value)
            if v.stores_integers:
                inverse, zero, low, high = self.result
                value = to_int8(f, value * inverse.vector, zero, low, high)
            target = y.at(self.w.channels * row + block * v.lanes)
            if count == v.lanes:
                target.store(value)
            else:
                for k in range(count):
                    target.store(f.emit(Type(value.type.element), f"extractelement {value}, i32 {k}", value), k)

"""Products of 8-bit integers added to 32-bit accumulators, exactly, with the instruction that a CPU has for them.

    vpdpbusd   x86 with VNNI       four products of u8 by i8 a lane
    sdot       ARMv8.2 (asimddp)   four products of i8 by i8 a lane
    vpmaddwd   other x86           two products of 16-bit values a lane; vpmaddubsw on bytes would saturate
    smlal      other CPUs          one product a lane; LLVM selects the multiplication that widens

vpdpbusd reads u8 and sdot i8: bytes of the other signedness are shifted by 128 (`shift`), which the caller subtracts with the zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT16, INT32, Function, Pointer, Type, Value

_VNNI = {4: "llvm.x86.avx512.vpdpbusd.128", 8: "llvm.x86.avx512.vpdpbusd.256", 16: "llvm.x86.avx512.vpdpbusd.512"}
_MADD = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
DEPTHS = {"vpdpbusd": 4, "sdot": 4, "vpmaddwd": 2, "smlal": 1}
"""Products that an instruction adds to a lane."""
_SIGN_BITS = 0x80808080 - (1 << 32)  # of four bytes, as i32


@dataclass(frozen=True)
class ByteProduct:
    """Products of inputs (`signed` or not) by i8 weights with `lanes` accumulators a vector."""

    instruction: str
    lanes: int
    signed: bool

    @property
    def depth(self) -> int:
        """Inputs of one element: the bytes whose products one lane adds up."""
        return DEPTHS[self.instruction]

    @property
    def shift(self) -> int:
        """What is added to each input before it is multiplied."""
        if self.instruction == "vpdpbusd" and self.signed:
            return 128
        return -128 if self.instruction == "sdot" and not self.signed else 0

    @property
    def element(self) -> Type:
        """The type that an element of inputs has in a register."""
        return INT16 if self.depth == 1 else INT32

    def load(self, f: Function, x: Pointer, count: int, present: int | None = None) -> list[Value]:
        """`count` elements at an address of bytes, each in all lanes. Of the only element, `present` bytes exist; the others are zeros."""
        depth = self.depth
        if present is not None:
            value = f.value(0, Type("i8", depth))
            for k in range(present):
                value = f.emit(value.type, f"insertelement {value}, {x.load(k)}, i32 {k}", value)
            return [self._spread(f, self._widen(f, value, 1), 0)]
        if self.lanes == 4 or depth == 1:  # multiplications by one lane of a vector exist on ARM
            elements = self._widen(f, x.load(0, count * depth), count)
            return [self._spread(f, elements, k) for k in range(count)]
        return [self._spread(f, self._widen(f, x.load(k * depth, depth), 1), 0) for k in range(count)]

    def _widen(self, f: Function, values: Value, count: int) -> Value:
        """Bytes as `count` elements, shifted if necessary."""
        if self.depth < 4:
            values = values.convert("sext" if self.signed else "zext", INT16)
        element = Type(self.element.element, count)
        if values.type != element:
            values = f.emit(element, f"bitcast {values} to {element}", values)
        return values ^ f.value(_SIGN_BITS, element) if self.shift else values

    def _spread(self, f: Function, elements: Value, lane: int) -> Value:
        if elements.lanes == 1:
            return elements.broadcast(self.lanes)
        return f.shuffle(elements, elements, [lane] * self.lanes)

    def load_weights(self, weights: Pointer, offset: int) -> Value:
        """The weights of one element for each lane, as `add` takes them."""
        values = weights.load(offset, self.lanes * self.depth)
        return values if self.depth == 4 else values.convert("sext", INT16)

    def add(self, f: Function, total: Value, x: Value, weights: Value) -> Value:
        """`total` plus the products of a loaded element and its weights."""
        if self.depth == 1:
            return total + x.convert("sext", INT32) * weights.convert("sext", INT32)
        operand = f.emit(weights.type, f"bitcast {x} to {weights.type}", x)
        if self.instruction == "vpmaddwd":
            return total + f.call_external(_MADD[self.lanes], total.type, operand, weights)
        if self.instruction == "sdot":
            return f.call_external("llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, total, operand, weights)
        words = f.emit(total.type, f"bitcast {weights} to {total.type}", weights)
        return f.call_external(_VNNI[self.lanes], total.type, total, x, words)


def choose_instruction(lanes: int) -> str:
    """The best instruction of this CPU for vectors of so many accumulators."""
    if jit.has("avx512_vnni") and (lanes == 16 or jit.has("avx512vl")):
        return "vpdpbusd"
    if jit.has("asimddp") and lanes == 4:
        return "sdot"
    if jit.has("avx512bw") if lanes == 16 else jit.has("avx2") if lanes == 8 else jit.has("sse2"):
        return "vpmaddwd"
    return "smlal"

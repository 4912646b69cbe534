"""Values as kernels store them: interleaved channels of pixels, and 32-bit floats rounded to bf16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, LANES, Function, Pointer, Type, Value

_NAN = 0x7FC0
_INSTRUCTIONS = ("avx512_bf16", "avx512bw", "avx512dq")
_LEAST_LLVM = 17  # older versions do not convert to bf16 in one instruction


@cache
def why_no_bf16() -> str | None:
    """Reason why kernels cannot use `convert_to_bf16`; None if they can."""
    if missing := next((name for name in _INSTRUCTIONS if not jit.has(name)), None):
        return f"the CPU has no {missing}"
    version = jit.get_version()  # "LLVM 20.1.8"
    return f"{version} is older than {_LEAST_LLVM}" if version and int(version.split()[1].split(".")[0]) < _LEAST_LLVM else None


def interleave(f: Function, planes: Sequence[Value]) -> Value:
    """Vectors of two to four channels as one, pixel by pixel."""
    channels, lanes = len(planes), planes[0].lanes
    missing = f.undefined(planes[0].type)
    a, b, c, d = [*planes, missing, missing][:4]
    first, second = (f.shuffle(x, y, range(2 * lanes)) for x, y in ((a, b), (c, d)))
    return f.shuffle(first, second, [channel * lanes + pixel for pixel in range(lanes) for channel in range(channels)])


def round_to_bf16(f: Function, value: Value) -> Value:
    """The bits of f32 values rounded to the nearest bf16, ties to even, as 16-bit integers."""
    bits = value.convert("bitcast", INT32)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return f.select(value.is_nan(), f.value(_NAN, bits.type), rounded).convert("trunc", INT16)


def convert_to_bf16(f: Function, value: Value) -> Value:
    """The same in one instruction of AVX512-BF16, where LLVM knows it (version 17 and newer); it makes zeros of denormal numbers."""
    type = Type("bfloat", value.lanes)
    return f.emit(type, f"fptrunc {value} to {type}", value).convert("bitcast", INT16)


def widen_bf16(value: Value) -> Value:
    """f32 values of the bits of bf16 as 16-bit integers."""
    return (value.convert("zext", INT32) << 16).convert("bitcast", FLOAT)


class Bf16Pointer:
    """An address of bf16 values, which are f32 in registers: `Pointer`'s methods with conversions."""

    def __init__(self, bits: Pointer) -> None:
        self._bits, self._f = bits, bits.function

    def at(self, offset: Value | int) -> Bf16Pointer:
        return Bf16Pointer(self._bits.at(offset))

    def load(self, offset: Value | int = 0, lanes: int = 1) -> Value:
        return widen_bf16(self._bits.load(offset, lanes))

    def load_vector(self, offset: Value | int = 0) -> Value:
        return self.load(offset, LANES)

    def store(self, value: Value, offset: Value | int = 0) -> None:
        self._bits.store(convert_to_bf16(self._f, value), offset)

    def load_masked(self, mask: Sequence[bool], others: Value) -> Value:
        """The lanes of `mask`, the others from `others`."""
        loaded = widen_bf16(self._bits.load_masked(mask, self._f.vector([0] * len(mask), INT16)))
        return self._f.select(self._f.mask(mask), loaded, others)

    def store_masked(self, value: Value, mask: Sequence[bool]) -> None:
        self._bits.store_masked(convert_to_bf16(self._f, value), mask)


FloatPointer = Pointer | Bf16Pointer


def make_float_pointer(word: Value, is_bf16: bool) -> FloatPointer:
    """The address in an i64, of f32 or of bf16."""
    return Bf16Pointer(word.as_pointer(INT16)) if is_bf16 else word.as_pointer(FLOAT)

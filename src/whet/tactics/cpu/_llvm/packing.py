"""Values as kernels store them: interleaved channels of pixels, and 32-bit floats rounded to bf16 or f16."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

from whet.network import BF16, F16, F32, DType
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import FLOAT, HALF, INT16, INT32, LANES, Function, Pointer, Type, Value

_NAN = 0x7FC0
_INSTRUCTIONS = {BF16: ("avx512_bf16", "avx512bw", "avx512dq"), F16: ("avx512_fp16", "avx512bw", "avx512dq", "avx512_vbmi2")}
_LEAST_LLVM = {BF16: 17, F16: 14}  # older versions do not convert to bf16 in one instruction, and do not multiply f16
RTOL = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}
"""Error of results by the type that operands and results are stored in."""


@cache
def why_no_small_float(dtype: DType) -> str | None:
    """Reason why kernels cannot compute on values that are stored in bf16 or f16; None if they can."""
    if missing := next((name for name in _INSTRUCTIONS[dtype] if not jit.has(name)), None):
        return f"the CPU has no {missing}"
    version, least = jit.get_version(), _LEAST_LLVM[dtype]  # "LLVM 20.1.8"
    return f"{version} is older than {least}" if version and int(version.split()[1].split(".")[0]) < least else None


def list_small_floats(features: Collection[str]) -> list[DType]:
    """The 16-bit types that kernels compute on here; `features` are those of the backend."""
    return [t for t, needed in _INSTRUCTIONS.items() if needed[0] in features and why_no_small_float(t) is None]


def find_faster_type(permitted: Collection[DType]) -> DType | None:
    """A permitted 16-bit type that this CPU multiplies faster than f32, or None."""
    return next((t for t, needed in _INSTRUCTIONS.items() if t in permitted and jit.has(needed[0])), None)


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


def widen_small_float(bits: Value, dtype: DType) -> Value:
    """f32 values of the bits of bf16 or f16 as 16-bit integers."""
    return widen_bf16(bits) if dtype == BF16 else bits.convert("bitcast", HALF).convert("fpext", FLOAT)


def round_to_small_float(f: Function, value: Value, dtype: DType) -> Value:
    """The bits of f32 values rounded to the nearest bf16 or f16, ties to even; larger ones become infinite."""
    return convert_to_bf16(f, value) if dtype == BF16 else value.convert("fptrunc", HALF).convert("bitcast", INT16)


class SmallFloatPointer:
    """An address of bf16 or f16 values, which are f32 in registers: `Pointer`'s methods with conversions."""

    def __init__(self, bits: Pointer, dtype: DType) -> None:
        self._bits, self._dtype, self._f = bits, dtype, bits.function

    def at(self, offset: Value | int) -> SmallFloatPointer:
        return SmallFloatPointer(self._bits.at(offset), self._dtype)

    def load(self, offset: Value | int = 0, lanes: int = 1) -> Value:
        return widen_small_float(self._bits.load(offset, lanes), self._dtype)

    def load_vector(self, offset: Value | int = 0) -> Value:
        return self.load(offset, LANES)

    def store(self, value: Value, offset: Value | int = 0) -> None:
        self._bits.store(round_to_small_float(self._f, value, self._dtype), offset)

    def load_masked(self, mask: Sequence[bool], others: Value) -> Value:
        """The lanes of `mask`, the others from `others`."""
        loaded = widen_small_float(self._bits.load_masked(mask, self._f.vector([0] * len(mask), INT16)), self._dtype)
        return self._f.select(self._f.mask(mask), loaded, others)

    def store_masked(self, value: Value, mask: Sequence[bool]) -> None:
        self._bits.store_masked(round_to_small_float(self._f, value, self._dtype), mask)


FloatPointer = Pointer | SmallFloatPointer


def make_float_pointer(word: Value, dtype: DType) -> FloatPointer:
    """The address in an i64, of f32, bf16 or f16."""
    return word.as_pointer(FLOAT) if dtype == F32 else SmallFloatPointer(word.as_pointer(INT16), dtype)

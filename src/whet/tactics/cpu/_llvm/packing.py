"""Values as kernels store them: interleaved channels of pixels, and 32-bit floats rounded to bf16."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, Function, Type, Value

_NAN = 0x7FC0


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

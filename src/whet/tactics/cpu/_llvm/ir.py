"""Lines of LLVM IR that kernels of our own are written with: 16 floats loaded, stored, spread; sums; the smaller of two numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

WIDE = 16
FLOATS = f"<{WIDE} x float>"
FENCE = '  call void asm sideeffect "", "~{memory}"()'
"""Nothing is moved over it. Without one behind each spread number, LLVM's scheduler loads many of them early, and sums leave the registers."""


def literal(value: float) -> str:
    """The nearest 32-bit float as LLVM writes it."""
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', nearest))[0]:016X}"


def vector(values: Sequence[float]) -> str:
    """A constant of 16 floats."""
    return f"<{', '.join(f'float {literal(v)}' for v in values)}>"


def load(name: str, base: str, offset: str | int) -> str:
    """%name is the vector at %base plus `offset` floats."""
    return f"{_place(name, base, offset)}\n  %{name} = load {FLOATS}, {FLOATS}* %{name}.v, align 4"


def store(value: str, name: str, base: str, offset: str | int) -> str:
    """The vector `value` goes to %base plus `offset` floats; `name` begins what is named on the way."""
    return f"{_place(name, base, offset)}\n  store {FLOATS} {value}, {FLOATS}* %{name}.v, align 4"


def spread(name: str, base: str, offset: str | int) -> str:
    """%name is 16 times the float at %base plus `offset`."""
    return (
        f"  %{name}.at = getelementptr float, float* %{base}, i64 {offset}\n"
        f"  %{name}.f = load float, float* %{name}.at, align 4\n"
        f"  %{name}.i = insertelement {FLOATS} undef, float %{name}.f, i32 0\n"
        f"  %{name} = shufflevector {FLOATS} %{name}.i, {FLOATS} undef, <{WIDE} x i32> zeroinitializer"
    )


def fma(name: str, x: str, y: str, z: str) -> str:
    """%name = x * y + z."""
    return f"  %{name} = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} {x}, {FLOATS} {y}, {FLOATS} {z})"


def least(name: str, a: str | int, b: str | int, larger: bool = False) -> str:
    """%name is the smaller (`larger`: the larger) of two i64."""
    return f"  %{name}.c = icmp {'sgt' if larger else 'slt'} i64 {a}, {b}\n  %{name} = select i1 %{name}.c, i64 {a}, i64 {b}"


def moved(name: str, base: str, count: str | int, unit: str | int = 1) -> str:
    """%name is the address %base plus `count` times `unit` floats."""
    return f"  %{name}.n = mul i64 {count}, {unit}\n  %{name} = getelementptr float, float* %{base}, i64 %{name}.n"


def opaque(name: str, value: str, kind: str = "i64") -> str:
    """%name is `value`, which LLVM cannot see: what is computed with it in a loop is computed there, not carried from turn to turn (that led to sums
    on the stack), and an address is one register (a sum of two costs a multiplication that reads there a slot: 1x1 with one block 5 %)."""
    return f'  %{name} = call {kind} asm "", "=r,0"({kind} {value})'


PREFETCH = "declare void @llvm.prefetch.p0i8(i8*, i32, i32, i32)"


def prefetch(name: str, base: str, offset: str | int) -> str:
    """The cache line at %base plus `offset` floats is asked for, which may be no memory; `name` begins what is named on the way."""
    return (
        f"  %{name}.at = getelementptr float, float* %{base}, i64 {offset}\n"
        f"  %{name}.line = bitcast float* %{name}.at to i8*\n"
        f"  call void @llvm.prefetch.p0i8(i8* %{name}.line, i32 0, i32 3, i32 1)"
    )


def _place(name: str, base: str, offset: str | int) -> str:
    return f"  %{name}.at = getelementptr float, float* %{base}, i64 {offset}\n  %{name}.v = bitcast float* %{name}.at to {FLOATS}*"

"""SiLU of 16 floats in LLVM IR, for the kernels that have it behind a sum in registers.

x / (1 + 2^(-x log2 e)). Below -87.3 the quotient is 0; NaN and infinities give what x * sigmoid(x) gives.

With AVX-512 (F and DQ) fourteen instructions: what is left over the floor, a polynomial for 2^r on [0, 1) of least relative error (8e-8), the power's
exponent set in one go, the quotient by the CPU's estimate of a reciprocal and one step of Newton's. Without, 2^r by Cephes' polynomial for exp2f on
[-1/2, 1/2] (2e-7), exponents added as integers, and a division.
"""

from __future__ import annotations

import struct

from whet.tactics.cpu._ir import FLOATS, WIDE

_FMA = f"call {FLOATS} @llvm.fma.v{WIDE}f32"
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1)
_POWER = (1.877576656567381e-3, 8.989340402895452e-3, 5.582631750406324e-2, 2.401536173741503e-1, 6.931530731287098e-1, 9.999999250674945e-1)
_NUMBERS = {"log2": -1.44269504088896341, "low": -126.0, "magic": 12582912.0, "one": 1.0, "least": -87.3, "zero": 0.0} | {
    f"{name}{k}": c for name, numbers in (("c", _EXP2), ("f", _POWER)) for k, c in enumerate(numbers)
}


def constants() -> str:
    """Lines that give the numbers their names; they stand before the first SiLU."""
    lines = []
    for name, value in _NUMBERS.items():
        bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<f", value))[0]))[0]
        lines.append(f"  %{name}.in = insertelement {FLOATS} undef, float 0x{bits:016X}, i32 0")
        lines.append(f"  %{name} = shufflevector {FLOATS} %{name}.in, {FLOATS} undef, <{WIDE} x i32> zeroinitializer")
    return "\n".join(lines)


def silu(x: str, n: str, estimate: bool) -> tuple[str, str]:
    """Lines that compute SiLU of %x; names begin with `n`. `estimate`: the CPU has AVX-512."""
    lines = [
        f"%{n}.t = fmul {FLOATS} %{x}, %log2",
        *(_power(n) if estimate else _power_by_integers(n)),
        f"%{n}.d = fadd {FLOATS} %{n}.e, %one",
        *(_estimated(n) if estimate else [f"%{n}.i = fdiv {FLOATS} %one, %{n}.d"]),
        f"%{n}.z = fcmp olt {FLOATS} %{x}, %least",
        f"%{n}.l = select <{WIDE} x i1> %{n}.z, {FLOATS} %zero, {FLOATS} %{n}.i",
        f"%{n}.o = fmul {FLOATS} %{x}, %{n}.l",
    ]
    return "\n".join(f"  {line}" for line in lines), f"%{n}.o"


def _power(n: str) -> list[str]:
    """%n.e = 2^%n.t. The rest over the floor of an infinity is 0, and the exponent is set by the floor of %n.t: 0 and infinity come out right."""
    lines = [f"%{n}.r = call {FLOATS} @llvm.x86.avx512.mask.reduce.ps.512({FLOATS} %{n}.t, i32 9, {FLOATS} %zero, i16 -1, i32 4)"]
    at = "%f0"
    for k in range(1, len(_POWER)):
        lines.append(f"%{n}.q{k} = {_FMA}({FLOATS} {at}, {FLOATS} %{n}.r, {FLOATS} %f{k})")
        at = f"%{n}.q{k}"
    return [*lines, f"%{n}.e = call {FLOATS} @llvm.x86.avx512.mask.scalef.ps.512({FLOATS} {at}, {FLOATS} %{n}.t, {FLOATS} %zero, i16 -1, i32 4)"]


def _power_by_integers(n: str) -> list[str]:
    """The same, above 2^-126. Adding 1.5 * 2^23 rounds, and leaves the integer in the lowest bits."""
    i = f"<{WIDE} x i32>"
    lines = [
        f"%{n}.tc = fcmp olt {FLOATS} %{n}.t, %low",
        f"%{n}.tl = select <{WIDE} x i1> %{n}.tc, {FLOATS} %low, {FLOATS} %{n}.t",
        f"%{n}.m = fadd {FLOATS} %{n}.tl, %magic",
        f"%{n}.n = fsub {FLOATS} %{n}.m, %magic",
        f"%{n}.r = fsub {FLOATS} %{n}.tl, %{n}.n",
    ]
    at = "%c0"
    for k in range(1, len(_EXP2)):
        lines.append(f"%{n}.q{k} = {_FMA}({FLOATS} {at}, {FLOATS} %{n}.r, {FLOATS} %c{k})")
        at = f"%{n}.q{k}"
    return [
        *lines,
        f"%{n}.p = {_FMA}({FLOATS} {at}, {FLOATS} %{n}.r, {FLOATS} %one)",
        f"%{n}.mi = bitcast {FLOATS} %{n}.m to {i}",
        f"%{n}.sh = shl {i} %{n}.mi, <{', '.join(['i32 23'] * WIDE)}>",
        f"%{n}.pi = bitcast {FLOATS} %{n}.p to {i}",
        f"%{n}.ei = add {i} %{n}.pi, %{n}.sh",
        f"%{n}.e = bitcast {i} %{n}.ei to {FLOATS}",
    ]


def _estimated(n: str) -> list[str]:
    """%n.i = 1 / %n.d."""
    return [
        f"%{n}.g = call {FLOATS} @llvm.x86.avx512.rcp14.ps.512({FLOATS} %{n}.d, {FLOATS} %zero, i16 -1)",
        f"%{n}.dn = fneg {FLOATS} %{n}.d",
        f"%{n}.h = {_FMA}({FLOATS} %{n}.dn, {FLOATS} %{n}.g, {FLOATS} %one)",
        f"%{n}.i = {_FMA}({FLOATS} %{n}.g, {FLOATS} %{n}.h, {FLOATS} %{n}.g)",
    ]


def declarations(estimate: bool) -> str:
    """Of the intrinsics that `silu` calls."""
    f = FLOATS
    own = f"""
declare {f} @llvm.x86.avx512.rcp14.ps.512({f}, {f}, i16)
declare {f} @llvm.x86.avx512.mask.reduce.ps.512({f}, i32, {f}, i16, i32)
declare {f} @llvm.x86.avx512.mask.scalef.ps.512({f}, {f}, {f}, i16, i32)"""
    return f"declare {f} @llvm.fma.v{WIDE}f32({f}, {f}, {f}){own if estimate else ''}"

"""SiLU of 16 floats in LLVM IR, for the kernels that have it behind a sum in registers.

x / (1 + 2^(-x log2 e)): 2^r by Cephes' polynomial for exp2f (relative error 2e-7), the quotient by the CPU's estimate of a reciprocal and one step
of Newton's, where there is one. Below -87.3 the quotient is 0; NaN and infinities give what x * sigmoid(x) gives.
"""

from __future__ import annotations

import struct

WIDE = 16
FLOATS = f"<{WIDE} x float>"
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1)
_NUMBERS = {"log2": -1.44269504088896341, "low": -126.0, "magic": 12582912.0, "one": 1.0, "least": -87.3, "zero": 0.0} | {
    f"c{k}": c for k, c in enumerate(_EXP2)
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
    """Lines that compute SiLU of %x; names begin with `n`. Adding 1.5 * 2^23 rounds, and leaves the integer in the lowest bits."""
    i = f"<{WIDE} x i32>"
    fma = f"call {FLOATS} @llvm.fma.v{WIDE}f32"
    lines = [
        f"%{n}.t0 = fmul {FLOATS} %{x}, %log2",
        f"%{n}.tc = fcmp olt {FLOATS} %{n}.t0, %low",
        f"%{n}.t = select <{WIDE} x i1> %{n}.tc, {FLOATS} %low, {FLOATS} %{n}.t0",
        f"%{n}.m = fadd {FLOATS} %{n}.t, %magic",
        f"%{n}.n = fsub {FLOATS} %{n}.m, %magic",
        f"%{n}.r = fsub {FLOATS} %{n}.t, %{n}.n",
        f"%{n}.p0 = fmul {FLOATS} %{n}.r, %c0",
        f"%{n}.q0 = fadd {FLOATS} %{n}.p0, %c1",
    ]
    at = f"%{n}.q0"
    for k in (2, 3, 4, 5):
        lines.append(f"%{n}.q{k} = {fma}({FLOATS} {at}, {FLOATS} %{n}.r, {FLOATS} %c{k})")
        at = f"%{n}.q{k}"
    lines += [
        f"%{n}.p = {fma}({FLOATS} {at}, {FLOATS} %{n}.r, {FLOATS} %one)",
        f"%{n}.mi = bitcast {FLOATS} %{n}.m to {i}",
        f"%{n}.sh = shl {i} %{n}.mi, <{', '.join(['i32 23'] * WIDE)}>",
        f"%{n}.pi = bitcast {FLOATS} %{n}.p to {i}",
        f"%{n}.ei = add {i} %{n}.pi, %{n}.sh",
        f"%{n}.e = bitcast {i} %{n}.ei to {FLOATS}",
        f"%{n}.d = fadd {FLOATS} %{n}.e, %one",
    ]
    if estimate:
        lines += [
            f"%{n}.g = call {FLOATS} @llvm.x86.avx512.rcp14.ps.512({FLOATS} %{n}.d, {FLOATS} %zero, i16 -1)",
            f"%{n}.dn = fneg {FLOATS} %{n}.d",
            f"%{n}.h = {fma}({FLOATS} %{n}.dn, {FLOATS} %{n}.g, {FLOATS} %one)",
            f"%{n}.i = {fma}({FLOATS} %{n}.g, {FLOATS} %{n}.h, {FLOATS} %{n}.g)",
        ]
    else:
        lines.append(f"%{n}.i = fdiv {FLOATS} %one, %{n}.d")
    lines += [
        f"%{n}.z = fcmp olt {FLOATS} %{x}, %least",
        f"%{n}.l = select <{WIDE} x i1> %{n}.z, {FLOATS} %zero, {FLOATS} %{n}.i",
        f"%{n}.o = fmul {FLOATS} %{x}, %{n}.l",
    ]
    return "\n".join(f"  {line}" for line in lines), f"%{n}.o"


def declarations(estimate: bool) -> str:
    """Of the intrinsics that `silu` calls; `estimate`: the CPU has AVX-512's reciprocal."""
    reciprocal = f"declare {FLOATS} @llvm.x86.avx512.rcp14.ps.512({FLOATS}, {FLOATS}, i16)"
    return f"declare {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS}, {FLOATS}, {FLOATS})\n{reciprocal if estimate else ''}"

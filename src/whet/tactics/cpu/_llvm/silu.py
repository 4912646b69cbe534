"""SiLU and the sigmoid of 16 floats in LLVM IR, for the kernels that have them behind a sum in registers.

With AVX-512 (F and DQ) both come from k(a) = 1 / (1 + e^a): a is |x|, at most 16, where k is 0; in each of sixteen pieces k is a polynomial of the
fourth degree. Where 0.937 a + 1 lies says in which: its exponent and two bits behind it are the place of the coefficients in five vectors. They are
those of the least error of a k(a), found by weighted least squares. SiLU is max(x, 0) - a k(a), in fourteen instructions: rounded as the CPU rounds
it is within 2.5e-6, above 0 within 4e-7 of itself (sums of some hundred products are no better), at 0 it is 0. The sigmoid is |k(a) - 1| or k(a),
in fifteen, within 5e-7. By powers of two, a reciprocal's estimate and Newton's step, nineteen operations on two ports that wait for each other,
SiLU took 11 cycles of a Cascade Lake; so it takes 6.5.

Without AVX-512 the sigmoid is 1 / (1 + 2^(-x log2 e)), 2^r by Cephes' polynomial for exp2f on [-1/2, 1/2] (2e-7), exponents added as integers,
0 below -87.3; and SiLU x times that. NaN and infinities give what the ops give.
"""

from __future__ import annotations

from whet.tactics.cpu._llvm.ir import FLOATS, WIDE, literal, vector

_FMA = f"call {FLOATS} @llvm.fma.v{WIDE}f32"
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1)
_END, _PACE = 16.0, 0.9372711  # where k ends; the pace at which a + 1 goes through [1, 16), which has sixteen pieces of 1/4 to 2
_CLOSER = f"i32 10, {FLOATS} %zero, i16 -1, i32 4"  # vrangeps: the smaller of two absolute values, without sign; a number beside NaN
# vfixupimmps, what becomes of each kind of number. 0 of negative ones and zeros, NaN of -inf; the others stay. Or 0 of negative ones, 1 of the others
_POSITIVE, _SIDE, _ALL = 0x08030820, 0xA8A8AA22 - (1 << 32), "i32 0, i16 -1, i32 4"
# Coefficients of -k(a), the highest first; the piece at 1 is the thirteenth: 1.0f >> 21 ends in 1100
_PIECES = (
    (
        0.0038914131, 0.00138505921, -0.000215433873, -0.000755647547, -0.00065209344, -0.000300685992, -0.000113677612, -4.03892554e-05,
        -8.59329884e-06, -1.02339698e-06, -1.21413308e-07, 7.27779025e-07, 0.00138146977, 0.0037393095, 0.00506514683, 0.00524402875,
    ),
    (
        -0.0205761846, -0.00453784224, 0.00892911851, 0.0145547325, 0.0130441133, 0.0070752902, 0.00313677173, 0.00128413935,
        0.000328448252, 4.78330512e-05, 6.71014368e-06, -4.34450558e-05, -0.0211568959, -0.023633223, -0.02638142, -0.0268597323,
    ),
    (
        -0.00730743865, -0.0460055061, -0.0886295065, -0.110634424, -0.102434725, -0.064299345, -0.0331321731, -0.0155462148,
        -0.00475197844, -0.000843651476, -0.000139693118, 0.000971547386, 3.10486903e-05, 0.00105890026, 0.00322105712, 0.00368563784,
    ),
    (
        0.257422239, 0.299146622, 0.359294683, 0.397615373, 0.377960533, 0.269338191, 0.159498528, 0.0852026343,
        0.030904619, 0.00666220998, 0.00129921373, -0.00964580663, 0.249998957, 0.249800175, 0.249034688, 0.248843715,
    ),
    (
        -0.502372801, -0.519332349, -0.551262558, -0.57633251, -0.558760166, -0.442382753, -0.296922117, -0.179050192,
        -0.0764129385, -0.019901434, -0.00455840398, 0.0358719975, -0.5, -0.499985039, -0.499882132, -0.499855071,
    ),
)  # fmt: skip
_NUMBERS = {"log2": -1.44269504088896341, "low": -126.0, "magic": 12582912.0, "one": 1.0, "least": -87.3, "zero": 0.0} | {
    f"c{k}": c for k, c in enumerate(_EXP2)
}


def constants() -> str:
    """Lines that give the numbers their names; they stand before the first SiLU."""
    lines = []
    for name, value in _NUMBERS.items():
        lines.append(f"  %{name}.in = insertelement {FLOATS} undef, float {literal(value)}, i32 0")
        lines.append(f"  %{name} = shufflevector {FLOATS} %{name}.in, {FLOATS} undef, <{WIDE} x i32> zeroinitializer")
    return "\n".join(lines)


def silu(x: str, n: str, estimate: bool) -> tuple[str, str]:
    """Lines that compute SiLU of %x, and the result's name; names begin with `n`. `estimate`: the CPU has AVX-512."""
    if not estimate:
        lines, quotient = sigmoid(x, n, estimate)
        return f"{lines}\n  %{n}.o = fmul {FLOATS} %{x}, {quotient}", f"%{n}.o"
    made = [*_pieces(x, n), _fixed(x, n, _POSITIVE), f"%{n}.o = {_FMA}({FLOATS} %{n}.a, {FLOATS} %{n}.k, {FLOATS} %{n}.f)"]
    return "\n".join(f"  {line}" for line in made), f"%{n}.o"


def sigmoid(x: str, n: str, estimate: bool) -> tuple[str, str]:
    """The same of the sigmoid."""
    if estimate:
        made = [
            *_pieces(x, n),
            _fixed(x, n, _SIDE),
            f"%{n}.s = fadd {FLOATS} %{n}.k, %{n}.f",
            f"%{n}.l = call {FLOATS} @llvm.fabs.v{WIDE}f32({FLOATS} %{n}.s)",
        ]
    else:
        made = [
            f"%{n}.t = fmul {FLOATS} %{x}, %log2",
            *_power_by_integers(n),
            f"%{n}.d = fadd {FLOATS} %{n}.e, %one",
            f"%{n}.i = fdiv {FLOATS} %one, %{n}.d",
            f"%{n}.z = fcmp olt {FLOATS} %{x}, %least",
            f"%{n}.l = select <{WIDE} x i1> %{n}.z, {FLOATS} %zero, {FLOATS} %{n}.i",
        ]
    return "\n".join(f"  {line}" for line in made), f"%{n}.l"


def _pieces(x: str, n: str) -> list[str]:
    """%n.a = min(|%x|, 16), of NaN too, and %n.k = -k(%n.a)."""
    i = f"<{WIDE} x i32>"
    made = [
        f"%{n}.a = call {FLOATS} @llvm.x86.avx512.mask.range.ps.512({FLOATS} %{x}, {FLOATS} {vector([_END] * WIDE)}, {_CLOSER})",
        f"%{n}.b = {_FMA}({FLOATS} %{n}.a, {FLOATS} {vector([_PACE] * WIDE)}, {FLOATS} %one)",
        f"%{n}.bi = bitcast {FLOATS} %{n}.b to {i}",
        f"%{n}.i = lshr {i} %{n}.bi, <{', '.join(['i32 21'] * WIDE)}>",  # of which vpermps reads the lowest four bits
    ]
    for k, numbers in enumerate(_PIECES):
        made.append(f"%{n}.c{k} = call {FLOATS} @llvm.x86.avx512.permvar.sf.512({FLOATS} {vector(numbers)}, {i} %{n}.i)")
        if k:
            before, now = f"%{n}.k{k - 1}" if k > 1 else f"%{n}.c0", f"%{n}.k{k}" if k + 1 < len(_PIECES) else f"%{n}.k"
            made.append(f"{now} = {_FMA}({FLOATS} {before}, {FLOATS} %{n}.a, {FLOATS} %{n}.c{k})")
    return made


def _fixed(x: str, n: str, kinds: int) -> str:
    """%n.f = what `kinds` make of %x."""
    table = f"<{WIDE} x i32> <{', '.join([f'i32 {kinds}'] * WIDE)}>"
    return f"%{n}.f = call {FLOATS} @llvm.x86.avx512.mask.fixupimm.ps.512({FLOATS} %{x}, {FLOATS} %{x}, {table}, {_ALL})"


def _power_by_integers(n: str) -> list[str]:
    """%n.e = 2^%n.t, above 2^-126. Adding 1.5 * 2^23 rounds, and leaves the integer in the lowest bits."""
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


def declarations(estimate: bool) -> str:
    """Of the intrinsics that `silu` and `sigmoid` call."""
    f, i = FLOATS, f"<{WIDE} x i32>"
    own = f"""
declare {f} @llvm.x86.avx512.mask.range.ps.512({f}, {f}, i32, {f}, i16, i32)
declare {f} @llvm.x86.avx512.mask.fixupimm.ps.512({f}, {f}, {i}, i32, i16, i32)
declare {f} @llvm.x86.avx512.permvar.sf.512({f}, {i})"""
    both = f"declare {f} @llvm.fma.v{WIDE}f32({f}, {f}, {f})\ndeclare {f} @llvm.fabs.v{WIDE}f32({f})"
    return f"{both}{own if estimate else ''}"

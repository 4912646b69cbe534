"""SiLU, the sigmoid, GELU and ReLU of floats in registers, for kernels that apply them to accumulators before storing.

With AVX-512 (F and DQ) SiLU and the sigmoid use k(a) = 1 / (1 + e^a) with a = min(|x|, 16) and k(16) = 0. k is a polynomial of degree four in each of
sixteen intervals (weighted least squares of the error of a k(a)). The exponent of 0.937 a + 1 and its two highest mantissa bits are the index of the
interval, and select its coefficients from five vectors. SiLU is max(x, 0) - a k(a), in fourteen instructions: the absolute error is at most 2.5e-6,
the relative error for x > 0 at most 4e-7, and SiLU(0) = 0. The sigmoid is |k(a) - 1| or k(a), in fifteen instructions, with an error of at most 5e-7.
SiLU takes 6.5 cycles on Cascade Lake; exp2, a reciprocal estimate and a Newton step (nineteen dependent operations on two ports) took 11.

Without AVX-512 the sigmoid is 1 / (1 + 2^(-x log2 e)), and 0 below -87.3; 2^r is Cephes' polynomial for exp2f on [-1/2, 1/2] (error 2e-7), with the
exponent added as an integer. SiLU is x times the sigmoid. NaN and infinities give the results of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, LANES, Function, Pointer, Type, Value

_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1)
_END, _SCALE = 16.0, 0.9372711  # k(_END) = 0; a * _SCALE + 1 is in [1, 16), in sixteen intervals of length 1/4 to 2
_LOG2E = 1.44269504088896341
_ERF_P = 0.3275911 * 0.70710678118654752  # of 7.1.26, for x / sqrt 2
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)  # highest degree first
_SMALLER_MAGNITUDE = 10  # operand of vrangeps: minimum of the absolute values; the number if the other operand is NaN
# Tables of vfixupimmps: negative numbers and zeros become 0, -inf NaN, others are kept; or negative numbers become 0, others 1
_POSITIVE_PART, _SIDE = 0x08030820, 0xA8A8AA22 - (1 << 32)
_CURRENT_ROUNDING = 4
# Coefficients of -k(a), highest degree first; the interval at 1 has index 12: 1.0f >> 21 ends in 1100
_COEFFICIENTS = (
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


class Activations:
    """SiLU, sigmoid, GELU and ReLU in one function. Create it at the start of the function, since it loads constants into registers.

    `has_avx512dq`: the CPU has AVX-512 F and DQ, and `lanes`, those of all values, are 16. `has_gelu`: GELU is computed too.
    """

    def __init__(self, f: Function, has_avx512dq: bool, lanes: int = LANES, has_gelu: bool = False) -> None:
        self._f, self._has_avx512dq = f, has_avx512dq

        def spread(number: float) -> Value:
            return f.value(number, FLOAT).broadcast(lanes)

        self.zero, self._one = spread(0.0), spread(1.0)
        if has_gelu:
            self._half, self._p, self._square_scale = spread(0.5), spread(_ERF_P), spread(-0.5 * _LOG2E)
            self._erf = [spread(c) for c in _ERF]
        if has_gelu or not has_avx512dq:
            self._minus_log2e, self._lowest_exponent, self._magic, self._least = map(spread, (-_LOG2E, -126.0, 12582912.0, -87.3))
            self._exp2_coefficients = [spread(c) for c in _EXP2]

    @property
    def keeps_nan(self) -> bool:
        """True if the sigmoid of NaN is NaN."""
        return self._has_avx512dq

    def relu(self, x: Value) -> Value:
        """max(x, 0); NaN stays NaN."""
        return self._f.select(x < self.zero, self.zero, x)

    def silu(self, x: Value) -> Value:
        if not self._has_avx512dq:
            return x * self._sigmoid_by_exp2(x)
        magnitude, k = self._minus_k(x)
        return self._f.fma(magnitude, k, self._fix_up(x, _POSITIVE_PART))

    def gelu(self, x: Value) -> Value:
        """x (1 + erf(x / sqrt 2)) / 2; erf by Abramowitz and Stegun, formula 7.1.26 (absolute error 1.5e-7)."""
        f = self._f
        t = self._one / f.fma(f.math("fabs", x), self._p, self._one)
        tail = self._erf[0]
        for c in self._erf[1:]:
            tail = f.fma(tail, t, c)
        tail = tail * t * self._half * self._exp2(x * x * self._square_scale)
        return x * f.select(x < self.zero, tail, self._one - tail)

    def sigmoid(self, x: Value) -> Value:
        if not self._has_avx512dq:
            return self._sigmoid_by_exp2(x)
        _, k = self._minus_k(x)
        return self._f.math("fabs", k + self._fix_up(x, _SIDE))

    def epilogue(self, x: Value, steps: Sequence[str], added: Pointer | None = None, offset: int = 0) -> Value:
        """Applies the epilogue `steps` to `x`: "Silu", "Relu" and "Add" (of the vector at `added` + `offset`), each at most once."""
        for step in steps:
            if step == "Add":
                assert added is not None
                x = x + added.load(offset, x.lanes)
            else:
                x = self.silu(x) if step == "Silu" else self.relu(x)
        return x

    def _minus_k(self, x: Value) -> tuple[Value, Value]:
        """a = min(|x|, 16), 16 for NaN, and -k(a)."""
        f = self._f
        every, rounding = f.value(-1, INT16), f.value(_CURRENT_ROUNDING, INT32)
        how = f.value(_SMALLER_MAGNITUDE, INT32)
        a = f.call_external("llvm.x86.avx512.mask.range.ps.512", x.type, x, f.value(_END, x.type), how, self.zero, every, rounding)
        index = f.fma(a, f.value(_SCALE, x.type), self._one).convert("bitcast", INT32) >> 21  # vpermps reads the lowest four bits
        k: Value | None = None
        for numbers in _COEFFICIENTS:
            c = f.call_external("llvm.x86.avx512.permvar.sf.512", x.type, f.vector(numbers), index)
            k = c if k is None else f.fma(k, a, c)
        assert k is not None
        return a, k

    def _fix_up(self, x: Value, table: int) -> Value:
        """Replaces x by its number class's entry in `table` (vfixupimmps)."""
        f = self._f
        kinds = f.value(table, Type("i32", LANES))
        rest = f.value(0, INT32), f.value(-1, INT16), f.value(_CURRENT_ROUNDING, INT32)
        return f.call_external("llvm.x86.avx512.mask.fixupimm.ps.512", x.type, x, x, kinds, *rest)

    def _sigmoid_by_exp2(self, x: Value) -> Value:
        inverse = self._one / (self._exp2(x * self._minus_log2e) + self._one)
        return self._f.select(x < self._least, self.zero, inverse)

    def _exp2(self, t: Value) -> Value:
        """2^t for t > -126. Adding 1.5 * 2^23 rounds to an integer in the lowest bits."""
        f = self._f
        t = f.select(t < self._lowest_exponent, self._lowest_exponent, t)
        rounded = t + self._magic
        rest = t - (rounded - self._magic)
        power = self._exp2_coefficients[0]
        for c in (*self._exp2_coefficients[1:], self._one):
            power = f.fma(power, rest, c)
        exponent = rounded.convert("bitcast", INT32) << 23
        return (power.convert("bitcast", INT32) + exponent).convert("bitcast", FLOAT)

"""Elementary functions of f32 values in registers, for any number of lanes. NaN and infinities give the results of the C library.

Polynomials: Cephes (Moshier), single precision: expf, logf, tanhf, erff; erfc from Abramowitz and Stegun, 7.1.26.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from whet.tactics.cpu._llvm.builder import FLOAT, INT32, Function, Value

_LOG2E, _MAGIC = 1.44269504088896341, 12582912.0  # adding 1.5 * 2^23 rounds to an integer in the lowest bits
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln(2) in two parts
_LEAST_EXPONENT, _LARGEST_EXPONENT = -87.3, 88.7228317  # exp is 0 below and infinite above
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1,
    3.3333331174e-1,
)  # fmt: skip
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_ERF = (
    7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2, 1.128358514861418e-1, -3.761262582423300e-1,
    1.128379167095513,
)  # fmt: skip
_ERFC = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_TINY = 1.17549435e-38  # the smallest normal number


class Math:
    """Functions of the values of one function under construction."""

    def __init__(self, f: Function) -> None:
        self._f = f

    def maximum(self, x: Value, y: Value) -> Value:
        """NaN if either is NaN."""
        f = self._f
        larger = f.select(x > y, x, y)
        return f.select(x.is_nan(), x, larger) if x.type.element == "float" else larger

    def minimum(self, x: Value, y: Value) -> Value:
        """NaN if either is NaN."""
        f = self._f
        smaller = f.select(x < y, x, y)
        return f.select(x.is_nan(), x, smaller) if x.type.element == "float" else smaller

    def clamp(self, x: Value, low: float | None, high: float | None) -> Value:
        """x limited to these numbers; NaN stays NaN. One instruction per bound, since the other operand of a comparison with NaN is selected."""
        f = self._f
        for bound, is_lower in ((low, True), (high, False)):
            if bound is not None:
                limit = f.value(bound, x.type)
                x = limit if isnan(bound) else f.select(limit > x if is_lower else limit < x, limit, x)
        return x

    def exp(self, x: Value) -> Value:
        f = self._f
        shifted = f.fma(x, f.value(_LOG2E, x.type), f.value(_MAGIC, x.type))
        n = shifted - _MAGIC
        rest = f.fma(n, f.value(-_LN2_LOW, x.type), f.fma(n, f.value(-_LN2_HIGH, x.type), x))
        power = f.fma(self._polynomial(_EXP, rest), rest * rest, rest) + 1.0
        exponent = shifted.convert("bitcast", INT32) << 23
        scaled = (power.convert("bitcast", INT32) + exponent).convert("bitcast", FLOAT)
        scaled = f.select(x < _LEAST_EXPONENT, f.value(0.0, x.type), scaled)
        scaled = f.select(x > _LARGEST_EXPONENT, f.value(float("inf"), x.type), scaled)
        return f.select(x.is_nan(), x, scaled)

    def expm1(self, x: Value) -> Value:
        """e^x - 1 with an absolute error of 1e-7; relative for |x| < 1/2."""
        f = self._f
        small = x * x * self._polynomial((1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5), x) + x
        return f.select(f.math("fabs", x) < 0.5, small, self.exp(x) - 1.0)

    def log(self, x: Value) -> Value:
        f = self._f
        is_denormal = x < _TINY
        normal = f.select(is_denormal, x * float(2**23), x)
        bits = normal.convert("bitcast", INT32)
        exponent = ((bits >> 23) - 126).convert("sitofp", FLOAT)
        exponent = f.select(is_denormal, exponent - 23.0, exponent)
        mantissa = ((bits & 0x007FFFFF) | 0x3F000000).convert("bitcast", FLOAT)
        is_low = mantissa < 0.707106781186547524
        exponent = f.select(is_low, exponent - 1.0, exponent)
        m = f.select(is_low, mantissa + mantissa, mantissa) - 1.0
        square = m * m
        y = self._polynomial(_LOG, m) * m * square
        y = f.fma(exponent, f.value(_LN2_LOW, x.type), y)
        y = f.fma(square, f.value(-0.5, x.type), y)
        result = f.fma(exponent, f.value(_LN2_HIGH, x.type), m + y)
        infinity = f.value(float("inf"), x.type)
        result = f.select(x.equals(infinity), infinity, result)
        result = f.select(x < 0.0, f.value(float("nan"), x.type), result)
        result = f.select(x.equals(f.value(0.0, x.type)), f.value(float("-inf"), x.type), result)
        return f.select(x.is_nan(), x, result)

    def sigmoid(self, x: Value) -> Value:
        return self._f.value(1.0, x.type) / (self.exp(-x) + 1.0)

    def tanh(self, x: Value) -> Value:
        f = self._f
        magnitude, square = f.math("fabs", x), x * x
        small = f.fma(self._polynomial(_TANH, square) * square, x, x)
        quotient = f.value(2.0, x.type) / (self.exp(magnitude + magnitude) + 1.0)
        large = f.math("copysign", f.value(1.0, x.type) - quotient, x)
        return f.select(magnitude < 0.625, small, f.select(x.is_nan(), x, large))

    def softplus(self, x: Value) -> Value:
        """log(1 + e^x)."""
        f = self._f
        return self.maximum(x, f.value(0.0, x.type)) + self.log(self.exp(-f.math("fabs", x)) + 1.0)

    def erf(self, x: Value) -> Value:
        f = self._f
        magnitude, square = f.math("fabs", x), x * x
        small = x * self._polynomial(_ERF, square)
        t = f.value(1.0, x.type) / f.fma(magnitude, f.value(0.3275911, x.type), f.value(1.0, x.type))
        large = f.math("copysign", f.value(1.0, x.type) - self._polynomial(_ERFC, t) * t * self.exp(-square), x)
        return f.select(magnitude < 1.0, small, f.select(x.is_nan(), x, large))

    def power(self, x: Value, exponent: int) -> Value:
        """x to a positive constant power, by repeated squaring."""
        result: Value | None = None
        while exponent:
            if exponent & 1:
                result = x if result is None else result * x
            exponent >>= 1
            if exponent:
                x = x * x
        assert result is not None
        return result

    def _polynomial(self, coefficients: Sequence[float], x: Value) -> Value:
        """Highest degree first."""
        y = self._f.value(coefficients[0], x.type)
        for c in coefficients[1:]:
            y = self._f.fma(y, x, self._f.value(c, x.type))
        return y

"""Softmax of rows in place, scaled and masked before: attention's middle, as LLVM IR.

exp is 2^n times a polynomial of the remainder (Cephes' expf: relative error 2e-7); below -87.3 it is 0. A row in which there is a NaN or
plus infinity, or nothing but minus infinity, is NaN, as the op says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from whet.tactics._attention import Guard
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

_LOG2E, _MAGIC, _LEAST = 1.44269504088896341, 12582912.0, -87.3  # adding 1.5 * 2^23 rounds; below -87.3 exp is 0
_LEAST_FINITE = -3.4028234663852886e38
_LN2_HIGH, _LN2_LOW = -0.693359375, 2.12194440e-4  # -ln(2) in two parts
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
WORDS = ("scores", "mask", "count", "keys", "rows", "head_step", "row_step", "share", "scale")
"""The context of `softmax`: f32 rows and mask, rows of this call, length of one, rows of a head, elements from head to head and row to row of the
mask, rows of a thread, the address of the scale and of the limit behind it."""


@cache
def emit_softmax_ir(masked: bool, tail: int = 0, guard: Guard = Guard.NONE, capped: bool = False) -> str:
    """`softmax(context)` in three passes over a row, which is in the first-level cache.

    `tail`: elements of a row after its whole vectors of 16. `guard`: the rows that are 0. `capped`: tanh limits the scaled scores.
    """
    module = Module()
    with parallel_kernel(module, "softmax", WORDS, "count") as (f, w):
        scales = w.scale.as_pointer(FLOAT)
        scale = scales.load().broadcast()
        cap = scales.at(1).load().broadcast() if capped else None
        scores = w.scores.as_pointer(FLOAT)
        row_of = _Row(f, w.keys, tail)
        with f.loop(w.begin, w.end) as rows:
            x = scores.at(rows.index * w.keys)
            mask = None
            if masked:
                head, row = rows.index // w.rows, rows.index % w.rows
                mask = w.mask.as_pointer(FLOAT).at(head * w.head_step + row * w.row_step)
            largest, visible = row_of.scale_and_mask(x, scale, cap, mask)
            total = row_of.exponentiate(x, largest)
            is_zero = {Guard.NONE: None, Guard.NAN: total.is_nan(), Guard.HIDDEN: visible < 0.5}[guard]
            row_of.divide(x, total, is_zero)
    return str(module)


class _Row:
    """The three passes over a row. Create it at the beginning of the function, since it loads constants into registers."""

    def __init__(self, f: Function, keys: Value, tail: int) -> None:
        def spread(number: float) -> Value:
            return f.value(number, FLOAT).broadcast()

        self._f, self._whole = f, keys - tail if tail else keys
        self._tail = [i < tail for i in range(LANES)] if tail else None
        self._log2e, self._ln2_high, self._ln2_low = spread(_LOG2E), spread(_LN2_HIGH), spread(_LN2_LOW)
        self._least, self._magic, self._zero, self._one = spread(_LEAST), spread(_MAGIC), spread(0.0), spread(1.0)
        self._lowest = spread(float("-inf"))
        self._exp = [spread(c) for c in _EXP]

    def scale_and_mask(self, x: Pointer, scale: Value, cap: Value | None, mask: Pointer | None) -> tuple[Value, Value]:
        """In place, limited to `cap` between; (the largest element, 1 if an element of the mask is not -infinity or 0) in every lane."""
        f, math = self._f, Math(self._f)

        def limit(score: Value) -> Value:
            return score if cap is None else math.tanh(score) * cap

        def mark_visible(before: Value, masks: Value | None) -> Value:
            return before if masks is None else f.select(masks < _LEAST_FINITE, before, self._one)

        with f.loop(0, self._whole, step=LANES, carried=[self._lowest, self._zero], at_least_once=self._tail is None) as loop:
            at = x.at(loop.index)
            scaled = limit(at.load_vector() * scale)
            masks = None if mask is None else mask.load_vector(loop.index)
            score = scaled + (self._zero if masks is None else masks)
            at.store(score)
            loop.carry(f.maximum(score, loop.values[0]), mark_visible(loop.values[1], masks))
        largest, visible = loop.results
        if self._tail is not None:
            at = x.at(self._whole)
            score = limit(at.load_masked(self._tail, self._lowest) * scale)
            if mask is not None:
                masks = mask.at(self._whole).load_masked(self._tail, self._lowest)
                score, visible = score + masks, mark_visible(visible, masks)
            at.store_masked(score, self._tail)
            # lanes past the end hold -inf times the scale, which a negative scale makes +inf, and of a mask NaN
            largest = f.maximum(f.select(f.mask(self._tail), score, self._lowest), largest)
        return self._reduce(f.maximum, largest), self._reduce(f.maximum, visible)

    def exponentiate(self, x: Pointer, largest: Value) -> Value:
        """exp of the row less its largest element, in place; the sum in every lane."""
        f = self._f
        with f.loop(0, self._whole, step=LANES, carried=[self._zero], at_least_once=self._tail is None) as loop:
            at = x.at(loop.index)
            power = self._exp_of(at.load_vector() - largest)
            at.store(power)
            loop.carry(loop.values[0] + power)
        total = loop.results[0]
        if self._tail is not None:
            at = x.at(self._whole)
            power = self._exp_of(at.load_masked(self._tail, largest) - largest)
            at.store_masked(power, self._tail)
            total = total + f.select(f.mask(self._tail), power, self._zero)
        return self._reduce(Value.__add__, total)

    def divide(self, x: Pointer, total: Value, is_zero: Value | None) -> None:
        """The row divided by its sum, in place; 0 if `is_zero`."""
        inverse = self._one / total

        def divided(value: Value) -> Value:
            quotient = value * inverse
            return quotient if is_zero is None else self._f.select(is_zero, self._zero, quotient)

        with self._f.loop(0, self._whole, step=LANES, at_least_once=self._tail is None) as loop:
            at = x.at(loop.index)
            at.store(divided(at.load_vector()))
        if self._tail is not None:
            at = x.at(self._whole)
            at.store_masked(divided(at.load_masked(self._tail, self._zero)), self._tail)

    def _exp_of(self, d: Value) -> Value:
        f = self._f
        shifted = f.fma(d, self._log2e, self._magic)
        n = shifted - self._magic
        rest = f.fma(n, self._ln2_low, f.fma(n, self._ln2_high, d))
        polynomial = self._exp[0]
        for c in self._exp[1:]:
            polynomial = f.fma(polynomial, rest, c)
        power = f.fma(polynomial, rest * rest, rest) + self._one
        exponent = shifted.convert("bitcast", INT32) << 23
        scaled = (power.convert("bitcast", INT32) + exponent).convert("bitcast", FLOAT)
        return f.select(d.is_nan(), d, f.select(d < self._least, self._zero, scaled))

    def _reduce(self, combine: Callable[[Value, Value], Value], value: Value) -> Value:
        """All lanes of `value` combined, in every lane."""
        for distance in (8, 4, 2, 1):
            value = combine(value, self._f.shuffle(value, value, [(i + distance) % LANES for i in range(LANES)]))
        return value

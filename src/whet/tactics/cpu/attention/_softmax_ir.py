"""Softmax of rows, scaled and masked before, as LLVM IR: between the products of an attention.

exp is 2^n times a polynomial of the remainder (Cephes' expf: relative error 2e-7); below -87.3 it is 0. A row in which there is a NaN or
plus infinity, or nothing but minus infinity, is NaN, as the op says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from whet.tactics._attention import Guard
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, Function, Pointer, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.packing import FloatPointer

_LOG2E, _MAGIC, _LEAST = 1.44269504088896341, 12582912.0, -87.3  # adding 1.5 * 2^23 rounds; below -87.3 exp is 0
_LEAST_FINITE = -3.4028234663852886e38
_LN2_HIGH, _LN2_LOW = -0.693359375, 2.12194440e-4  # -ln(2) in two parts
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@dataclass(frozen=True)
class Keys:
    """The length of a row: `whole`, a multiple of the vector's length, and `tail` more elements (less than a vector)."""

    whole: Value | int
    tail: int


class RowSoftmax:
    """The three passes over a row, in vectors of `lanes`. Create it at the beginning of the function, since it loads constants into registers.

    `scales`: the scale, and the limit of the scaled scores if they are `capped` by tanh. `guard`: the rows that are 0.
    """

    def __init__(self, f: Function, scales: Pointer, lanes: int, guard: Guard, capped: bool) -> None:
        def spread(number: float) -> Value:
            return f.value(number, FLOAT).broadcast(lanes)

        self._f, self._lanes, self._guard = f, lanes, guard
        self._scale = scales.load().broadcast(lanes)
        self._cap = scales.at(1).load().broadcast(lanes) if capped else None
        self._log2e, self._ln2_high, self._ln2_low = spread(_LOG2E), spread(_LN2_HIGH), spread(_LN2_LOW)
        self._least, self._magic, self._zero, self._one = spread(_LEAST), spread(_MAGIC), spread(0.0), spread(1.0)
        self._lowest = spread(float("-inf"))
        self._exp = [spread(c) for c in _EXP]

    def emit(self, x: Pointer, target: FloatPointer, keys: Keys, mask: Pointer | Value | None) -> None:
        """The softmax of the row `x`, which is overwritten, at `target` (it may be `x`). `mask`: a row, or the same value for all keys (scalar)."""
        f = self._f
        shared = mask.broadcast(self._lanes) if isinstance(mask, Value) and not isinstance(mask, Pointer) else None
        is_stored = mask is not None or self._cap is not None
        largest, visible = self._find_largest(x, keys, mask if isinstance(mask, Pointer) else None, shared, is_stored)
        total = self._exponentiate(x, keys, largest, None if is_stored else self._scale)
        is_zero = {Guard.NONE: None, Guard.NAN: total.is_nan(), Guard.HIDDEN: visible < 0.5}[self._guard]
        inverse = self._one / total

        def divide(value: Value) -> Value:
            quotient = value * inverse
            return quotient if is_zero is None else f.select(is_zero, self._zero, quotient)

        for at, lanes in self._walk(keys):
            if lanes is None:
                target.at(at).store(divide(x.at(at).load(0, self._lanes)))
            else:
                target.at(at).store_masked(divide(x.at(at).load_masked(lanes, self._zero)), lanes)

    def _walk(self, keys: Keys, carried: list[Value] | None = None) -> Iterator[tuple[Value, list[bool] | None]]:
        """Emits the caller's loop body for whole vectors, then once for the tail. Yields the index, and the lanes of a tail; the caller replaces the
        elements of `carried`."""
        values = carried if carried is not None else []
        with self._f.loop(0, keys.whole, step=self._lanes, carried=values, at_least_once=not keys.tail) as loop:
            values[:] = loop.values
            yield loop.index, None
            loop.carry(*values)
        values[:] = loop.results
        if keys.tail:
            yield self._f.value(keys.whole), [i < keys.tail for i in range(self._lanes)]

    def _find_largest(self, x: Pointer, keys: Keys, mask: Pointer | None, shared: Value | None, is_stored: bool) -> tuple[Value, Value]:
        """(the largest masked score, 1 if an element of the mask is not -infinity or 0) in every lane. Masked scores replace `x` if `is_stored`."""
        f, math, found = self._f, Math(self._f), [self._lowest, self._zero]
        for index, lanes in self._walk(keys, found):
            at = x.at(index)
            score = (at.load(0, self._lanes) if lanes is None else at.load_masked(lanes, self._zero)) * self._scale
            if self._cap is not None:
                score = math.tanh(score) * self._cap
            added = shared
            if mask is not None:
                added = mask.load(index, self._lanes) if lanes is None else mask.at(index).load_masked(lanes, self._lowest)
            if added is not None:
                score = score + added
            if lanes is not None:
                score = f.select(f.mask(lanes), score, self._lowest)
            if is_stored:
                at.store(score) if lanes is None else at.store_masked(score, lanes)
            found[0] = f.maximum(score, found[0])
            if added is not None:
                found[1] = f.select(added < _LEAST_FINITE, found[1], self._one)
        return self._reduce(f.maximum, found[0]), self._reduce(f.maximum, found[1])

    def _exponentiate(self, x: Pointer, keys: Keys, largest: Value, scale: Value | None) -> Value:
        """exp of the row, times `scale` if given, less its largest element, in place; the sum in every lane."""
        f, total = self._f, [self._zero]
        for index, lanes in self._walk(keys, total):
            at = x.at(index)
            score = at.load(0, self._lanes) if lanes is None else at.load_masked(lanes, self._zero)
            power = self._exp_of((score if scale is None else score * scale) - largest)
            if lanes is None:
                at.store(power)
            else:
                at.store_masked(power, lanes)
                power = f.select(f.mask(lanes), power, self._zero)
            total[0] = total[0] + power
        return self._reduce(Value.__add__, total[0])

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
        distance = self._lanes // 2
        while distance:
            value = combine(value, self._f.shuffle(value, value, [(i + distance) % self._lanes for i in range(self._lanes)]))
            distance //= 2
        return value

"""LLVM IR of Softmax and LogSoftmax along the innermost axis in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

WORDS = ("x", "y", "count", "width", "share")
"""The context: f32 rows in and out, their count and length; rows per thread."""


@cache
def emit_softmax_rows_ir(tail: int, is_log: bool) -> str:
    """`softmax_rows(context)`: a row's maximum, then its powers, which Softmax stores, and their sum, then the result. `tail`: elements after
    the whole vectors of a row."""
    module = Module()
    with parallel_kernel(module, "softmax_rows", WORDS, "count") as (f, w):
        math, mask = Math(f), [i < tail for i in range(LANES)]
        lowest, zero = (f.value(number, FLOAT).broadcast() for number in (float("-inf"), 0.0))
        whole = w.width - tail if tail else w.width
        with f.loop(w.begin, w.end) as rows:
            x, y = (word.as_pointer(FLOAT).at(rows.index * w.width) for word in (w.x, w.y))
            with f.loop(0, whole, step=LANES, carried=[lowest]) as maxima:
                maxima.carry(math.maximum(maxima.values[0], x.load_vector(maxima.index)))
            (largest,) = maxima.results
            if tail:
                largest = math.maximum(largest, x.at(whole).load_masked(mask, lowest))
            largest = _combine_lanes(f, largest, math.maximum)
            with f.loop(0, whole, step=LANES, carried=[zero]) as powers:
                power = math.exp(x.load_vector(powers.index) - largest)
                if not is_log:
                    y.store(power, powers.index)
                powers.carry(powers.values[0] + power)
            (total,) = powers.results
            if tail:
                power = math.exp(x.at(whole).load_masked(mask, lowest) - largest)
                if not is_log:
                    y.at(whole).store_masked(power, mask)
                total = total + power
            total = _combine_lanes(f, total, Value.__add__)
            logarithm = math.log(total) if is_log else zero
            inverse = zero if is_log else f.value(1.0, total.type) / total
            source = x if is_log else y

            def finish(value: Value, largest: Value = largest, logarithm: Value = logarithm, inverse: Value = inverse) -> Value:
                return value - largest - logarithm if is_log else value * inverse

            with f.loop(0, whole, step=LANES) as results:
                y.store(finish(source.load_vector(results.index)), results.index)
            if tail:
                y.at(whole).store_masked(finish(source.at(whole).load_masked(mask, zero)), mask)
    return str(module)


def _combine_lanes(f: Function, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """The combination of all lanes, in every lane."""
    for distance in (8, 4, 2, 1):
        value = combine(value, f.shuffle(value, value, [(i + distance) % LANES for i in range(LANES)]))
    return value

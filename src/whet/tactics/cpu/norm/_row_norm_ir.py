"""Norms of rows as LLVM IR: RMSNormalization (Zhang and Sennrich, 2019, arXiv:1910.07467), LayerNormalization (Ba et al., 2016, 1607.06450)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from whet.network import F32, DType
from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import FloatPointer, make_float_pointer
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

WORDS = ("x", "y", "count", "width", *LAST_WORDS)
"""The context of `row_norm`: rows in and out, their count and length; packed: LANES parameters (epsilon, 1 / width), the scale, the bias."""


@cache
def emit_row_norm_ir(tail: int, is_centered: bool, stored: DType = F32) -> str:
    """`row_norm(context)`: each row is read again from the cache for the result, and for its variance if it `is_centered`: LayerNormalization
    subtracts the mean and adds a bias. `tail`: elements of a row after its whole vectors. `stored`: type of the rows in memory."""
    module = Module()
    with parallel_kernel(module, "row_norm", WORDS, "count") as (f, w):
        parameters = w.packed.as_pointer(FLOAT)
        epsilon, inverse_width = parameters.load(0).broadcast(), parameters.load(1).broadcast()
        scale = parameters.at(LANES)
        bias = scale.at(w.width)
        zero, one = (f.value(number, FLOAT).broadcast() for number in (0.0, 1.0))
        mask = [i < tail for i in range(LANES)]
        whole = w.width - tail if tail else w.width

        def emit_total(x: FloatPointer, add: Callable[[Value, Value], Value], missing: Value) -> Value:
            """The sum over a row in every lane; elements after its end are `missing`."""
            with f.loop(0, whole, step=LANES, carried=[zero], at_least_once=not tail) as loop:
                loop.carry(add(x.load_vector(loop.index), loop.values[0]))
            found = loop.results[0]
            if tail:
                found = add(x.at(whole).load_masked(mask, missing), found)
            return _sum_of_lanes(f, found)

        with f.loop(w.begin, w.end) as rows:
            x, y = (make_float_pointer(w_, stored).at(rows.index * w.width) for w_ in (w.x, w.y))
            mean = emit_total(x, lambda value, running: running + value, zero) * inverse_width if is_centered else zero

            def emit_centered(value: Value, mean: Value = mean) -> Value:
                return value - mean if is_centered else value

            def add_square(value: Value, total: Value, centered: Callable[[Value], Value] = emit_centered) -> Value:
                value = centered(value)
                return f.fma(value, value, total)

            inverse: Value = one / f.math("sqrt", emit_total(x, add_square, mean) * inverse_width + epsilon)
            with f.loop(0, whole, step=LANES, at_least_once=not tail) as loop:
                value = emit_centered(x.load_vector(loop.index)) * inverse * scale.load_vector(loop.index)
                y.at(loop.index).store(value + bias.load_vector(loop.index) if is_centered else value)
            if tail:
                value = emit_centered(x.at(whole).load_masked(mask, zero)) * inverse * scale.at(whole).load_masked(mask, zero)
                y.at(whole).store_masked(value + bias.at(whole).load_masked(mask, zero) if is_centered else value, mask)
    return str(module)


def _sum_of_lanes(f: Function, value: Value) -> Value:
    for distance in (8, 4, 2, 1):
        value = value + f.shuffle(value, value, [(i + distance) % LANES for i in range(LANES)])
    return value

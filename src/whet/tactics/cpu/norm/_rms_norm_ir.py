"""LLVM IR of RMSNormalization: rows divided by their root mean square, times a scale (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Module, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

WORDS = ("x", "y", "count", "width", *LAST_WORDS)
"""The context of `rms_norm`: f32 rows in and out, their count and length; packed: LANES parameters (epsilon, 1 / width), the scale."""


@cache
def rms_norm_ir(tail: int) -> str:
    """`rms_norm(context)`: each row is read twice, the second time from the cache. `tail`: elements of a row after its whole vectors."""
    module = Module()
    with parallel_kernel(module, "rms_norm", WORDS, "count") as (f, w):
        parameters = w.packed.as_pointer(FLOAT)
        epsilon, inverse_width = parameters.load(0).broadcast(), parameters.load(1).broadcast()
        scale = parameters.at(LANES)
        zero, one = (f.value(number, FLOAT).broadcast() for number in (0.0, 1.0))
        mask = [i < tail for i in range(LANES)]
        whole = w.width - tail if tail else w.width
        with f.loop(w.begin, w.end) as rows:
            x, y = (w_.as_pointer(FLOAT).at(rows.index * w.width) for w_ in (w.x, w.y))
            with f.loop(0, whole, step=LANES, carried=[zero], at_least_once=not tail) as loop:
                value = x.load_vector(loop.index)
                loop.carry(f.fma(value, value, loop.values[0]))
            total = loop.results[0]
            if tail:
                value = x.at(whole).load_masked(mask, zero)
                total = f.fma(value, value, total)
            for distance in (8, 4, 2, 1):
                total = total + f.shuffle(total, total, [(i + distance) % LANES for i in range(LANES)])
            inverse: Value = one / f.math("sqrt", total * inverse_width + epsilon)
            with f.loop(0, whole, step=LANES, at_least_once=not tail) as loop:
                y.at(loop.index).store(x.load_vector(loop.index) * inverse * scale.load_vector(loop.index))
            if tail:
                normalized = x.at(whole).load_masked(mask, zero) * inverse
                y.at(whole).store_masked(normalized * scale.at(whole).load_masked(mask, zero), mask)
    return str(module)

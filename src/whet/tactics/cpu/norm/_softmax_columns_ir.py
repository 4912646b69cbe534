"""LLVM IR of Softmax and LogSoftmax along an axis that is not the innermost one in memory: adjacent columns in vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

CHUNK = 2 * LANES  # columns of one item: two vectors, for instruction-level parallelism
WORDS = ("x", "y", "items", "length", "columns", "chunks", "share")
"""The context of `softmax_columns`: f32 in and out, items (chunks of all groups of columns), elements of a column, columns of a group, their
chunks."""


@cache
def emit_softmax_columns_ir(tail: int, is_log: bool = False) -> str:
    """`softmax_columns(context)`: three passes over each chunk. `tail`: columns of a group after its whole chunks."""
    module = Module()
    with parallel_kernel(module, "softmax_columns", WORDS, "items") as (f, w):
        with f.loop(w.begin, w.end) as items:
            start = items.index % w.chunks * CHUNK
            offset = items.index // w.chunks * (w.length * w.columns) + start
            x, y = (word.as_pointer(FLOAT).at(offset) for word in (w.x, w.y))
            left = w.columns - start
            with f.when(left >= CHUNK):
                _emit_columns(f, x, y, w.length, w.columns, [(0, LANES), (LANES, LANES)], is_log)
            if tail:
                groups = [(0, LANES)] * (tail >= LANES)
                done = LANES * len(groups)
                for lanes in (8, 4, 2, 1):
                    if tail % LANES & lanes:
                        groups.append((done, lanes))
                        done += lanes
                with f.when(left < CHUNK):
                    _emit_columns(f, x, y, w.length, w.columns, groups, is_log)
    return str(module)


def _emit_columns(f: Function, x: Pointer, y: Pointer, length: Value, stride: Value, groups: Sequence[tuple[int, int]], is_log: bool) -> None:
    """The columns of `groups`, each (first column, lanes)."""
    math = Math(f)

    def emit_numbers(value: float) -> list[Value]:
        return [f.value(value, Type("float", lanes)) for _, lanes in groups]

    with f.loop(0, length, carried=emit_numbers(float("-inf"))) as maxima:
        row = x.at(maxima.index * stride)
        maxima.carry(*(math.maximum(m, row.load(at, lanes)) for m, (at, lanes) in zip(maxima.values, groups, strict=True)))
    with f.loop(0, length, carried=emit_numbers(0.0)) as powers:
        source, target = x.at(powers.index * stride), y.at(powers.index * stride)
        totals = []
        for total, largest, (at, lanes) in zip(powers.values, maxima.results, groups, strict=True):
            power = math.exp(source.load(at, lanes) - largest)
            if not is_log:
                target.store(power, at)
            totals.append(total + power)
        powers.carry(*totals)
    if is_log:
        logarithms = [math.log(total) for total in powers.results]
        with f.loop(0, length) as differences:
            source, target = x.at(differences.index * stride), y.at(differences.index * stride)
            for logarithm, largest, (at, lanes) in zip(logarithms, maxima.results, groups, strict=True):
                target.store(source.load(at, lanes) - largest - logarithm, at)
        return
    inverses = [one / total for one, total in zip(emit_numbers(1.0), powers.results, strict=True)]
    with f.loop(0, length) as quotients:
        row = y.at(quotients.index * stride)
        for inverse, (at, lanes) in zip(inverses, groups, strict=True):
            row.store(row.load(at, lanes) * inverse, at)

"""LLVM IR of InstanceNormalization and GroupNormalization: rows less their mean, over their deviation, times a scale, plus a bias per channel.

A row has the pixels of one channel, or of a group of channels.
"""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.elementwise._reduce_ir import Reduction, reduce_rows

WORDS = ("x", "y", "count", "width", "group", "groups", *LAST_WORDS)
"""The context of `instance_norm`: f32 rows in and out, their count, pixels of a channel, channels of a row, rows of a batch item; packed: LANES
parameters (epsilon, 1 / elements of a row), then scale and bias of all channels."""


class _SquaredDistance(Reduction):
    """The sum of squared distances from a mean."""

    def __init__(self, f: Function, mean: Value) -> None:
        super().__init__(f, "ReduceSum")
        self._mean = mean

    def step(self, accumulator: Value, x: Value) -> Value:
        d = x - (self._mean.broadcast(x.lanes) if x.lanes > 1 else self._mean)
        return self._f.fma(d, d, accumulator)


@cache
def emit_instance_norm_ir(row_tail: int, tail: int) -> str:
    """`instance_norm(context)`: each row is read three times. `row_tail`, `tail`: elements of a row, of a channel, after their whole vectors."""
    module = Module()
    with parallel_kernel(module, "instance_norm", WORDS, "count") as (f, w):
        parameters = w.packed.as_pointer(FLOAT)
        epsilon, inverse_length = parameters.load(0), parameters.load(1)
        one = f.value(1.0, FLOAT)
        length = w.width * w.group
        with f.loop(w.begin, w.end) as rows:
            x, y = (word.as_pointer(FLOAT).at(rows.index * length) for word in (w.x, w.y))
            mean = reduce_rows(f, Reduction(f, "ReduceSum"), x, [], length, row_tail) * inverse_length
            variance = reduce_rows(f, _SquaredDistance(f, mean), x, [], length, row_tail) * inverse_length
            inverse_deviation = one / f.math("sqrt", variance + epsilon)
            first = rows.index % w.groups * w.group
            with f.loop(0, w.group) as channels:
                channel, at = first + channels.index, channels.index * w.width
                factor = parameters.at(LANES).load(channel) * inverse_deviation
                bias = parameters.at(LANES).at(w.groups * w.group).load(channel)
                _scale(f, x.at(at), y.at(at), (mean, factor, bias), w.width, tail)
    return str(module)


def _scale(f: Function, x: Pointer, y: Pointer, scalars: tuple[Value, Value, Value], width: Value, tail: int) -> None:
    """y = (x - mean) * factor + bias."""

    def emit_part(index: Value, lanes: int) -> None:
        mean, factor, bias = (s.broadcast(lanes) if lanes > 1 else s for s in scalars)
        y.store(f.fma(x.load(index, lanes) - mean, factor, bias), index)

    whole = width - tail
    with f.loop(0, whole, step=LANES) as vectors:
        emit_part(vectors.index, LANES)
    done = 0
    for lanes in (8, 4, 2, 1):
        if tail & lanes:
            emit_part(whole + done, lanes)
            done += lanes

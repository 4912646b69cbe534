"""Products of few rows with a constant matrix, as LLVM IR: the weights are read once, in order, at the bandwidth of the memory.

Results are divided into strips of a few vectors. The weights of a strip are adjacent: [input][result] in f32; in bf16 [pair of inputs][result][input
of the pair], which is widened to two vectors of f32 by a shift and a mask. For each cache line that is read, the line `_AHEAD` lines later is
prefetched into L2; at the end of a strip it belongs to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.network import BF16, F32
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_chain
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import make_float_pointer
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

_UNROLLED = 4  # inputs, or pairs of them
_AHEAD = 96
_LINE = 64  # bytes
_UPPER = -65536  # the mask of the upper 16 bits
_SIZES = ("inputs", "channels", "whole", "strip_bytes", "bias", "strips")
"""Inputs, or pairs of them, of a row; results of a row; strips of whole vectors, bytes of one; offset in bytes of the biases; all strips."""


@dataclass(frozen=True)
class Form:
    """The compile-time parameters. `vectors`: of a strip. `last`: vectors of the last strip with fewer results, and the results of its last vector;
    (0, 0) if there is none."""

    is_bf16: bool
    lanes: int
    rows: int
    vectors: int
    last: tuple[int, int]
    steps: tuple[Step, ...]


def list_context_words(form: Form) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    added = ("added",) if any(s.reads_residual for s in form.steps) else ()
    return ("source", "target", *added, *_SIZES, *LAST_WORDS)


@cache
def emit_row_ir(form: Form) -> str:
    """`rows(context)`."""
    module = Module()
    strip = _emit_strip_function(module, "strip", form, form.vectors, form.lanes)
    last = _emit_strip_function(module, "last_strip", form, *form.last) if form.last[0] else None
    with parallel_kernel(module, "rows", list_context_words(form), "strips") as (f, w):
        with f.loop(w.begin, f.minimum(w.end, w.whole)) as strips:
            f.call(strip, w.context, strips.index)
        if last is not None:
            with f.loop(f.maximum(w.begin, w.whole), w.end) as strips:
                f.call(last, w.context, strips.index)
    return str(module)


def _emit_strip_function(module: Module, name: str, form: Form, vectors: int, last_lanes: int) -> Function:
    """`name(context, strip)`: the results of a strip of so many vectors."""
    with module.function(name, ["i64*", "i64"]) as f:
        context, strip = f.arguments
        assert isinstance(context, Pointer)
        words = {word: context.load(k) for k, word in enumerate(list_context_words(form))}
        _emit_strip(f, SimpleNamespace(**words), form, strip, vectors, last_lanes)
    return f


def _emit_strip(f: Function, w: SimpleNamespace, form: Form, strip: Value, vectors: int, last_lanes: int) -> None:
    lanes, rows, size = form.lanes, form.rows, form.rows * vectors
    parts = max(1, min(_UNROLLED, 8 // size))
    element = INT32 if form.is_bf16 else FLOAT
    weights = (w.packed + strip * w.strip_bytes).as_pointer(element)
    source = w.source.as_pointer(element)
    zeros = [f.value(0.0, Type("float", lanes))] * (parts * size)

    def accumulate(index: Value, at: Pointer, count: int, sums: Sequence[Value]) -> list[Value]:
        sums = list(sums)
        for u in range(count):
            columns = [_widen(at.load((u * vectors + k) * lanes, lanes), form) for k in range(vectors)]
            for byte in range(-(u * vectors * lanes * 4) % _LINE, vectors * lanes * 4, _LINE):
                at.prefetch(u * vectors * lanes + byte // 4 + _AHEAD * _LINE // 4, to_second_cache=True)
            for r in range(rows):
                numbers = _widen(source.at(w.inputs * r + index).load(u).broadcast(lanes), form)
                for k, column in enumerate(columns):
                    i = u % parts * size + r * vectors + k
                    for number, weight in zip(numbers, column, strict=True):
                        sums[i] = f.fma(number, weight, sums[i])
            f.scheduling_barrier()
        return sums

    unrolled = w.inputs - w.inputs % _UNROLLED
    with f.loop(0, unrolled, step=_UNROLLED, carried=zeros) as many:
        many.carry(*accumulate(many.index, f.opaque_pointer(weights.at(many.index * (vectors * lanes))), _UNROLLED, many.values))
    with f.loop(unrolled, w.inputs, carried=many.results) as rest:
        rest.carry(*accumulate(rest.index, weights.at(rest.index * (vectors * lanes)), 1, rest.values))
    total = rest.results[:size]
    for part in range(1, parts):
        total = [a + b for a, b in zip(total, rest.results[part * size : (part + 1) * size], strict=True)]
    column = strip * (form.vectors * lanes)
    bias = (w.packed + w.bias).as_pointer(FLOAT).at(column)
    stored = BF16 if form.is_bf16 else F32
    target = make_float_pointer(w.target, stored)
    added = make_float_pointer(w.added, stored) if any(s.reads_residual for s in form.steps) else None
    for r in range(rows):
        for k in range(vectors):
            offset = w.channels * r + column + k * lanes
            mask = [lane < last_lanes for lane in range(lanes)] if k == vectors - 1 and last_lanes < lanes else None
            residual = None
            if added is not None:
                at = added.at(offset)
                residual = at.load(0, lanes) if mask is None else at.load_masked(mask, f.value(0.0, Type("float", lanes)))
            value = emit_chain(f, form.steps, total[r * vectors + k] + bias.load(k * lanes, lanes), residual)
            if mask is None:
                target.at(offset).store(value)
            else:
                target.at(offset).store_masked(value, mask)


def _widen(value: Value, form: Form) -> list[Value]:
    """A vector of f32 as it is; one of pairs of bf16 as the first and the second values of the pairs."""
    if not form.is_bf16:
        return [value]
    return [bits.convert("bitcast", FLOAT) for bits in (value << 16, value & _UPPER)]

"""A copy whose source index is a sum of one term per axis of the result, as LLVM IR: the terms are in tables."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import INT64, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._loops import count_lanes, list_context_words

PARTS = 3  # words of a part of a row: its length, the first term, the terms' step


@cache
def emit_mapped_copy_ir(element: Type, outer: int, inner: str, ways: int, filled: bool) -> str:
    """`mapped_copy(context)`: one item per row, whose index gives its indices along the `outer` axes.

    The context: addresses of the source, the tables (for each outer axis its terms, then the description of a row), the value of elements that no
    index gives (`filled`; a negative term marks them) and the result; rows, the source's first element, elements of a row, and the sizes of the outer
    axes. `inner` is the kind of a row:

    - "parts": the row is described by a number of parts, then for each (length, first term, step).
    - "interleaved": `ways` sequences of equal length in turn; described by a sequence's step, the sequences' distance and the first term.
    """
    places = ("source", "tables", *(["fill"] if filled else []), "target")
    words = list_context_words(places, ("offset", "width", *(f"size{k}" for k in range(outer))))
    module = Module()
    with parallel_kernel(module, "mapped_copy", words, "items") as (f, w):
        source, target, tables = w.source.as_pointer(element), w.target.as_pointer(element), w.tables.as_pointer(INT64)
        fill = w.fill.as_pointer(element).load() if filled else f.value(0, element)
        sizes = [getattr(w, f"size{k}") for k in range(outer)]
        starts: list[Value] = [f.value(0)]
        for size in sizes:
            starts.append(starts[-1] + size)
        with f.loop(w.begin, w.end) as rows:
            position, first, marks = rows.index, w.offset, f.value(0)
            for k in reversed(range(outer)):
                term = tables.load(starts[k] + (position % sizes[k] if k else position))
                position = position // sizes[k] if k else position
                first, marks = first + term, marks | term
            row = _Row(f, element, source.at(first), target.at(rows.index * w.width), fill, marks if filled else None)
            if inner == "parts":
                row.copy_parts(tables.at(starts[-1]))
            else:
                row.interleave(tables.at(starts[-1]), w.width // ways, ways)
    return str(module)


class _Row:
    """One row of the result; `marks` is negative if no element of it has an index."""

    def __init__(self, f: Function, element: Type, source: Pointer, target: Pointer, fill: Value, marks: Value | None) -> None:
        self._f, self._source, self._target, self._fill, self._marks = f, source, target, fill, marks
        self._lanes = count_lanes(element)

    def copy_parts(self, description: Pointer) -> None:
        f = self._f
        with f.loop(0, description.load(), carried=[f.value(0)]) as parts:
            (begin,) = parts.values
            part = description.at(parts.index * PARTS + 1)
            length, term, step = part.load(), part.load(1), part.load(2)
            target, source = self._target.at(begin), self._source.at(term)
            cases = [(step.equals(1), lambda: self._copy(source, target, length)), (None, lambda: self._gather(source, target, length, step))]
            if self._marks is not None:
                cases.insert(0, ((self._marks | term) < 0, lambda: self._set(target, length)))
            f.choose(cases)
            parts.carry(begin + length)

    def _copy(self, source: Pointer, target: Pointer, length: Value) -> list[Value]:
        f, lanes = self._f, self._lanes
        with f.loop(0, length - (lanes - 1), step=lanes) as many:
            target.store(source.load(many.index, lanes), many.index)
        with f.loop(many.index, length) as one:
            target.store(source.load(one.index), one.index)
        return []

    def _set(self, target: Pointer, length: Value) -> list[Value]:
        f, lanes = self._f, self._lanes
        with f.loop(0, length - (lanes - 1), step=lanes) as many:
            target.store(self._fill.broadcast(lanes), many.index)
        with f.loop(many.index, length) as one:
            target.store(self._fill, one.index)
        return []

    def _gather(self, source: Pointer, target: Pointer, length: Value, step: Value) -> list[Value]:
        with self._f.loop(0, length) as one:
            target.store(source.load(one.index * step), one.index)
        return []

    def interleave(self, description: Pointer, length: Value, ways: int) -> None:
        """target[i * ways + k] = source[i * step + k * distance]."""
        f, lanes, step, distance = self._f, self._lanes, description.load(), description.load(1)
        first = self._source.at(description.load(2))
        sources = [first.at(distance * k) for k in range(ways)]
        whole = f.value(0)
        if ways in (2, 4):
            whole = f.select(step.equals(1), length - length % lanes, 0)
            with f.loop(0, whole, step=lanes) as many:
                vectors = [s.load(many.index, lanes) for s in sources]
                while len(vectors) > 1:
                    half = len(vectors) // 2
                    n = vectors[0].lanes
                    order = [x for i in range(n) for x in (i, n + i)]
                    vectors = [f.shuffle(a, b, order) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
                self._target.store(vectors[0], many.index * ways)
        with f.loop(whole, length) as one:
            for k, s in enumerate(sources):
                self._target.store(s.load(one.index * step), one.index * ways + k)

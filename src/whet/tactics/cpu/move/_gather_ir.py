"""Entries of a tensor at indices as LLVM IR, for Gather, GatherElements and GatherND: a row of the result is a contiguous part of the source."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import INT64, Module, Type
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

AXES = 4  # most indices of a row
WORDS = (
    "x", "at", "y", "fault", "count", "per", "index_step", "lines", "batch_step", "width",
    *(f"{name}{k}" for name in ("size", "step") for k in range(AXES)), *LAST_WORDS,
)  # fmt: skip
"""The context of `gather`: addresses of the source, the indices and the result; the address of a word that an index out of range sets to 1; rows of
the result. `per` of them make a batch part: for a row r = part * per + rest, its indices are those of row part * index_step + rest, and it is the
source's row part * batch_step + r % lines + the sum of index * step. `width`: elements of a row. For each index the size of its axis, and its step
in rows."""


@cache
def emit_gather_ir(element: str, lanes: int, indices: str, axes: int, packed: str) -> str:
    """`gather(context)`: elements of an integer type as long as the copied ones, `lanes` at once; indices of a type, `axes` for each row.

    `packed`: the operand that is the packed one ("x" or "at"), or "". Negative indices count from the end. Where one is out of range, entry 0 is
    copied.
    """
    module = Module()
    with parallel_kernel(module, "gather", WORDS, "count") as (f, w):
        source = (w.packed if packed == "x" else w.x).as_pointer(Type(element))
        places = (w.packed if packed == "at" else w.at).as_pointer(Type(indices))
        target = w.y.as_pointer(Type(element))
        with f.loop(w.begin, w.end) as rows:
            part, rest = rows.index // w.per, rows.index % w.per
            own = places.at((part * w.index_step + rest) * axes)
            row = part * w.batch_step + rows.index % w.lines
            for k in range(axes):
                size, index = getattr(w, f"size{k}"), own.load(k)
                index = index if indices == "i64" else index.convert("sext", INT64)
                index = f.select(index < 0, index + size, index)
                outside = (index < 0) | (index >= size)
                with f.when(outside):
                    w.fault.as_pointer(INT64).store(f.value(1))
                row = row + f.select(outside, f.value(0), index) * getattr(w, f"step{k}")
            x, y = source.at(row * w.width), target.at(rows.index * w.width)
            whole = w.width - w.width % lanes
            with f.loop(0, whole, step=lanes) as many:
                y.store(x.load(many.index, lanes), many.index)
            with f.loop(whole, w.width) as one:
                y.store(x.load(one.index), one.index)
    return str(module)

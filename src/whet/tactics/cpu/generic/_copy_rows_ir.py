"""Rows copied between tensors with different distances of rows, as LLVM IR."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import Module, Type
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._loops import count_lanes, list_context_words


@cache
def emit_copy_rows_ir(element: Type) -> str:
    """`copy_rows(context)`: one item per row. Numbers: elements of a row; for the source and the target the first element and the
    distance of rows."""
    words = list_context_words(("source", "target"), ("width", "first", "pitch", "target_first", "target_pitch"))
    module, lanes = Module(), count_lanes(element)
    with parallel_kernel(module, "copy_rows", words, "items") as (f, w), f.loop(w.begin, w.end) as rows:
        x = w.source.as_pointer(element).at(w.first + rows.index * w.pitch)
        y = w.target.as_pointer(element).at(w.target_first + rows.index * w.target_pitch)
        with f.loop(0, w.width - (lanes - 1), step=lanes) as many:
            y.store(x.load(many.index, lanes), many.index)
        with f.loop(many.index, w.width) as one:
            y.store(x.load(one.index), one.index)
    return str(module)

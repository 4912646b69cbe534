"""A copy with other strides as LLVM IR: the result is contiguous, with four axes."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import Module, Type
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

AXES = 4
WORDS = ("x", "y", *(f"{name}{k}" for name in ("size", "step") for k in range(AXES)), "lines", *LAST_WORDS)
"""The context: addresses; the result's sizes, and the strides of the source in elements; lines, the product of the
first two sizes."""


@cache
def emit_strided_copy_ir(element: str, lanes: int) -> str:
    """`strided_copy(context)`: elements of an integer type as long as the copied ones; `lanes` at once if the last stride is 1 (`lanes` above 1)."""
    module = Module()
    with parallel_kernel(module, "strided_copy", WORDS, "lines") as (f, w):
        source, target = (word.as_pointer(Type(element)) for word in (w.x, w.y))
        with f.loop(w.begin, w.end) as lines:
            x = source.at((lines.index // w.size1) * w.step0 + (lines.index % w.size1) * w.step1)
            y = target.at(lines.index * (w.size2 * w.size3))
            with f.loop(0, w.size2) as rows:
                row, out = x.at(rows.index * w.step2), y.at(rows.index * w.size3)
                whole = w.size3 - w.size3 % lanes if lanes > 1 else f.value(0)
                if lanes > 1:
                    with f.loop(0, whole, step=lanes) as many:
                        out.store(row.load(many.index, lanes), many.index)
                with f.loop(whole, w.size3) as one:
                    out.store(row.load(one.index * w.step3), one.index)
    return str(module)

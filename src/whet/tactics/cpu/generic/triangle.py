"""Trilu with a known diagonal. For coverage: otherwise NumPy computes it; ONNX Runtime takes half of its time."""

from __future__ import annotations

from functools import cache
from math import prod

from whet.network import Layer, static_shape
from whet.ops._base import find_given_dims, find_given_ints
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import Module, Type
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._lines_ir import spread
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, count_lanes, get_moved_type, list_context_words


@tactic
class Triangle(LoopTactic):
    ops = ("Trilu",)

    def refuses_types(self, layer: Layer) -> str | None:
        if layer.input(1) is not None and find_given_dims(layer, "k", 1) is None:
            return "its diagonal is computed at run time"
        return "moves elements of whole bytes" if get_moved_type(layer.needs(0).dtype) is None else None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x = layer.needs(0)
        shape, element = static_shape(x.shape), get_moved_type(x.dtype)
        assert element is not None
        upper, diagonal = bool(layer.attrs["upper"]), (find_given_ints(layer, "k", 1) or (0,))[0]
        limit = max(shape[-2:])  # of the boundary that follows
        first = min(max(diagonal + (not upper), -limit), limit)
        rows = prod(shape[:-1])
        launch = Launch("triangle", emit_triangle_ir(element, upper), (("input", 0), ("output", 0)), rows, (*shape[-2:], first), work=prod(shape))
        return Loops((launch,))


@cache
def emit_triangle_ir(element: Type, upper: bool) -> str:
    """`triangle(context)`: one item per row of matrices. The elements of row i from i + `first` on are copied (`upper`) or those before it; the
    others are zeros."""
    words = list_context_words(("source", "target"), ("height", "width", "first"))
    module, lanes = Module(), count_lanes(element)
    with parallel_kernel(module, "triangle", words, "items") as (f, w), f.loop(w.begin, w.end) as rows:
        x, y = (p.as_pointer(element).at(rows.index * w.width) for p in (w.source, w.target))
        boundary = f.minimum(f.maximum(rows.index % w.height + w.first, 0), w.width)
        zero = f.value(0, element)
        for copied, begin, end in ((not upper, f.value(0), boundary), (upper, boundary, w.width)):
            with f.loop(begin, end - (lanes - 1), step=lanes) as many:
                y.store(x.load(many.index, lanes) if copied else spread(zero, lanes), many.index)
            with f.loop(many.index, end) as one:
                y.store(x.load(one.index) if copied else zero, one.index)
    return str(module)

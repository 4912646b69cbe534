"""OneHot of integer indices. For coverage: otherwise NumPy computes it."""

from __future__ import annotations

from functools import cache

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import INT32, INT64, Module, Type, Value
from whet.tactics.cpu.generic._lines_ir import count_line_items, line_kernel, spread
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, count_lanes, get_moved_type, split_axes

_INDICES = {"i32": INT32, "i64": INT64}


@tactic
class OneHot(LoopTactic):
    ops = ("OneHot",)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return (0, 2)

    def refuses_types(self, layer: Layer) -> str | None:
        if layer.needs(0).dtype.name not in _INDICES:
            return "takes indices of 4 or 8 bytes"
        return "moves elements of whole bytes" if get_moved_type(layer.needs(2).dtype) is None else None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        y = layer.outputs[0]
        element = get_moved_type(y.dtype)
        assert element is not None
        outer, depth, inner = split_axes(static_shape(y.shape), layer.attrs["axis"])
        items, blocks = count_line_items(outer, inner)
        ir = emit_one_hot_ir(element, _INDICES[layer.needs(0).dtype.name], inner == 1)
        places = (("input", 0), ("input", 2), ("output", 0))
        return Loops((Launch("one_hot", ir, places, items, (depth, inner, blocks), work=outer * depth * inner),))


@cache
def emit_one_hot_ir(element: Type, indices: Type, contiguous: bool) -> str:
    """`one_hot(context)`: a line of the result has values[1] at its index, which counts from the end if it is negative, and values[0] elsewhere.
    `contiguous` for lines whose elements are neighbours."""
    module, lanes = Module(), count_lanes(element)
    with line_kernel(module, "one_hot", ("at", "values", "target")) as (f, w, for_lines):
        at, values, target = w.at.as_pointer(indices), w.values.as_pointer(element), w.target.as_pointer(element)
        off, on = values.load(0), values.load(1)

        def emit(group: Value, line: Value, width: int) -> None:
            y = target.at(group * (w.length * w.inner) + line)
            if contiguous:
                with f.loop(0, w.length - (lanes - 1), step=lanes) as many:
                    y.store(spread(off, lanes), many.index)
                with f.loop(many.index, w.length) as one:
                    y.store(off, one.index)
            else:
                with f.loop(0, w.length) as rows:
                    y.store(off, rows.index * w.inner)
            index = at.load(group * w.inner + line)
            index = index if indices == INT64 else index.convert("sext", INT64)
            index = f.select(index < 0, index + w.length, index)
            with f.when((index >= 0) & (index < w.length)):
                y.store(on, index * w.inner)

        for_lines(1, emit)
    return str(module)

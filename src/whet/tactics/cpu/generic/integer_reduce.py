"""ReduceSum, ReduceProd, ReduceMax and ReduceMin of integers along adjacent axes. For coverage: otherwise NumPy computes them."""

from __future__ import annotations

from functools import cache
from math import prod

from whet.network import Layer, static_shape
from whet.ops._reduce import list_reduced_axes
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import Module, Type, Value
from whet.tactics.cpu.generic._lines_ir import count_line_items, line_kernel
from whet.tactics.cpu.generic._loops import NUMBERS, Launch, Loops, LoopTactic, count_lanes

_TYPES = ("i8", "i16", "i32", "i64")


@tactic
class IntegerReduce(LoopTactic):
    ops = ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")

    def refuses_types(self, layer: Layer) -> str | None:
        x = layer.needs(0).dtype.name
        if x not in _TYPES:
            return f"reduces {', '.join(_TYPES)}, not {x}"
        axes = list_reduced_axes(layer)
        return None if axes and axes == tuple(range(axes[0], axes[-1] + 1)) else "the reduced axes are not adjacent"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, shape, axes = layer.needs(0), static_shape(layer.needs(0).shape), list_reduced_axes(layer)
        outer, length, inner = prod(shape[: axes[0]]), prod(shape[axes[0] : axes[-1] + 1]), prod(shape[axes[-1] + 1 :])
        items, blocks = count_line_items(outer, inner)
        ir = emit_integer_reduce_ir(NUMBERS[x.dtype.name], layer.op)
        return Loops((Launch("integer_reduce", ir, (("input", 0), ("output", 0)), items, (length, inner, blocks), work=outer * length * inner),))


@cache
def emit_integer_reduce_ir(element: Type, op: str) -> str:
    """`integer_reduce(context)`: the elements of each line combined by the reduction `op`; sums and products wrap."""
    module = Module()
    with line_kernel(module, "integer_reduce", ("source", "target")) as (f, w, for_lines):
        source, target = w.source.as_pointer(element), w.target.as_pointer(element)

        def combine(a: Value, b: Value) -> Value:
            match op:
                case "ReduceSum":
                    return a + b
                case "ReduceProd":
                    return a * b
                case "ReduceMax":
                    return f.maximum(a, b)
            return f.minimum(a, b)

        def emit(group: Value, line: Value, lanes: int) -> None:
            x = source.at(group * (w.length * w.inner) + line)
            with f.loop(1, w.length, carried=[x.load(0, lanes)]) as loop:
                loop.carry(combine(loop.values[0], x.load(loop.index * w.inner, lanes)))
            target.store(loop.values[0], group * w.inner + line)

        for_lines(count_lanes(element), emit)
    return str(module)

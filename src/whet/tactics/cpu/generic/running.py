"""CumSum and CumProd. For coverage: otherwise NumPy computes them."""

from __future__ import annotations

from functools import cache

from whet.network import Layer, static_shape
from whet.ops._running import get_running_axis
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import Module, Type, Value
from whet.tactics.cpu.generic._lines_ir import count_line_items, line_kernel
from whet.tactics.cpu.generic._loops import NUMBERS, Launch, Loops, LoopTactic, count_lanes, split_axes


@tactic
class Running(LoopTactic):
    ops = ("CumSum", "CumProd")

    def refuses_types(self, layer: Layer) -> str | None:
        return None if layer.needs(0).dtype.name in NUMBERS else f"computes in {', '.join(NUMBERS)}"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, a = layer.needs(0), layer.attrs
        outer, length, inner = split_axes(static_shape(x.shape), get_running_axis(layer))
        items, blocks = count_line_items(outer, inner)
        first, step = ((length - 1) * inner, -inner) if a["reverse"] else (0, inner)
        ir = emit_running_ir(NUMBERS[x.dtype.name], layer.op == "CumProd", bool(a["exclusive"]))
        numbers = (length, inner, blocks, first, step)
        return Loops((Launch("running", ir, (("input", 0), ("output", 0)), items, numbers, work=outer * length * inner),), rtol=1e-6)


@cache
def emit_running_ir(element: Type, product: bool, exclusive: bool) -> str:
    """`running(context)`: sums of the elements of a line so far, or products; of those before an element if `exclusive`. The order of additions is
    the line's. Numbers: the offset of a line's first element, and the distance to the next."""
    module = Module()
    with line_kernel(module, "running", ("source", "target"), ("first", "step")) as (f, w, for_lines):
        source, target = w.source.as_pointer(element), w.target.as_pointer(element)

        def emit(group: Value, line: Value, lanes: int) -> None:
            start = group * (w.length * w.inner) + line + w.first
            initial = f.value(int(product), Type(element.element, lanes))
            with f.loop(0, w.length, carried=[initial]) as loop:
                at = start + loop.index * w.step
                x, before = source.load(at, lanes), loop.values[0]
                after = before * x if product else before + x
                target.store(before if exclusive else after, at)
                loop.carry(after)

        for_lines(count_lanes(element), emit)
    return str(module)

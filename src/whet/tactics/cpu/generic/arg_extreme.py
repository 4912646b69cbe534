"""ArgMax and ArgMin. For coverage: otherwise NumPy computes them."""

from __future__ import annotations

from functools import cache

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import INT32, INT64, Function, Module, Type, Value
from whet.tactics.cpu.generic._lines_ir import count_line_items, extract, iota, line_kernel, spread
from whet.tactics.cpu.generic._loops import NUMBERS, Launch, Loops, LoopTactic, count_lanes, split_axes

_LONGEST = 1 << 31  # elements of a line: their indices have 32 bits


@tactic
class ArgExtreme(LoopTactic):
    ops = ("ArgMax", "ArgMin")

    def refuses_types(self, layer: Layer) -> str | None:
        return None if layer.needs(0).dtype.name in NUMBERS else f"compares {', '.join(NUMBERS)}"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, a = layer.needs(0), layer.attrs
        outer, length, inner = split_axes(static_shape(x.shape), a["axis"])
        if length >= _LONGEST:
            return f"a line has {length} elements"
        items, blocks = count_line_items(outer, inner)
        ir = emit_arg_ir(NUMBERS[x.dtype.name], layer.op == "ArgMax", bool(a["select_last_index"]), inner == 1)
        return Loops((Launch("arg_extreme", ir, (("input", 0), ("output", 0)), items, (length, inner, blocks), work=outer * length * inner),))


class _Search:
    """The extreme of values and its index: the first of equal ones, or the last. A NaN is more extreme than numbers."""

    def __init__(self, f: Function, largest: bool, last: bool) -> None:
        self._f, self._largest, self._last = f, largest, last

    def step(self, best: list[Value], x: Value, index: Value) -> list[Value]:
        """[extreme, index] after `x` at an index above the others."""
        value, _ = best
        better = (x >= value if self._largest else value >= x) if self._last else (x > value if self._largest else x < value)
        if x.type.is_float:
            better = better | (x.is_nan() & (value.is_nan() ^ 1) if not self._last else x.is_nan())
        return [self._f.select(better, x, best[0]), self._f.select(better, index, best[1])]

    def join(self, a: list[Value], b: list[Value]) -> list[Value]:
        """The better of two, whose indices are in any order."""
        f = self._f
        better = b[0] > a[0] if self._largest else b[0] < a[0]
        equal = b[0].equals(a[0])
        if a[0].type.is_float:
            first, second = a[0].is_nan(), b[0].is_nan()
            better, equal = better | (second & (first ^ 1)), equal | (first & second)
        later = b[1] > a[1]
        better = better | (equal & (later if self._last else later ^ 1))
        return [f.select(better, b[0], a[0]), f.select(better, b[1], a[1])]


@cache
def emit_arg_ir(element: Type, largest: bool, last: bool, contiguous: bool) -> str:
    """`arg_extreme(context)`: the index of the extreme of each line as i64; `contiguous` for lines whose elements are neighbours."""
    module, lanes = Module(), count_lanes(element)
    with line_kernel(module, "arg_extreme", ("source", "target")) as (f, w, for_lines):
        source, target, search = w.source.as_pointer(element), w.target.as_pointer(INT64), _Search(f, largest, last)
        short = w.length.convert("trunc", INT32)

        def emit_strided(group: Value, line: Value, width: int) -> None:
            x = source.at(group * (w.length * w.inner) + line)
            with f.loop(1, w.length, carried=[x.load(0, width), f.value(0, Type("i32", width))]) as loop:
                index = spread(loop.index.convert("trunc", INT32), width)
                loop.carry(*search.step(loop.values, x.load(loop.index * w.inner, width), index))
            target.store(loop.values[1].convert("sext", INT64), group * w.inner + line)

        def emit_contiguous(group: Value, line: Value, width: int) -> None:
            x = source.at(group * w.length)

            def search_vectors() -> list[Value]:
                with f.loop(lanes, w.length - (lanes - 1), step=lanes, carried=[x.load(0, lanes), iota(f, INT32, lanes)]) as many:
                    index = spread(many.index.convert("trunc", INT32), lanes) + iota(f, INT32, lanes)
                    many.carry(*search.step(many.values, x.load(many.index, lanes), index))
                best = [extract(f, v, 0) for v in many.values]
                for lane in range(1, lanes):
                    best = search.join(best, [extract(f, v, lane) for v in many.values])
                return [*best, many.index]

            found = f.choose([(short >= lanes, search_vectors), (None, lambda: [x.load(), f.value(0, INT32), f.value(1)])])
            with f.loop(found[2], w.length, carried=found[:2]) as one:
                one.carry(*search.step(one.values, x.load(one.index), one.index.convert("trunc", INT32)))
            target.store(one.values[1].convert("sext", INT64), group)

        for_lines(1 if contiguous else lanes, emit_contiguous if contiguous else emit_strided)
    return str(module)

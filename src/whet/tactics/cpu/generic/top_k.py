"""TopK by a heap of the k best entries of a line, which is then sorted. For coverage: otherwise NumPy sorts whole lines.

Values of up to 32 bits are in the heap with their indices, in one word; for longer ones the heap has the indices, and compares the values in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, INT64, Function, Module, Pointer, Type, Value
from whet.tactics.cpu.generic._lines_ir import count_line_items, line_kernel
from whet.tactics.cpu.generic._loops import NUMBERS, Launch, Loops, LoopTactic, split_axes

_LONG = ("f64", "i64")
_TYPES = ("f32", "i32", "i16", "i8", *_LONG)
_LONGEST = 1 << 31  # elements of a line: their indices have 32 bits


@tactic
class TopK(LoopTactic):
    ops = ("TopK",)

    def refuses_types(self, layer: Layer) -> str | None:
        return None if layer.needs(0).dtype.name in _TYPES else f"sorts {', '.join(_TYPES)}"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, a = layer.needs(0), layer.attrs
        outer, length, inner = split_axes(static_shape(x.shape), a["axis"])
        kept = split_axes(static_shape(layer.outputs[0].shape), a["axis"])[1]
        if length >= _LONGEST:
            return f"a line has {length} elements"
        items, blocks = count_line_items(outer, inner)
        ir = emit_top_k_ir(NUMBERS[x.dtype.name], bool(a["largest"]))
        places = (("input", 0), ("output", 0), ("output", 1))
        # an element takes as long as a dozen of an elementwise op
        return Loops((Launch("top_k", ir, places, items, (length, inner, blocks, kept), work=12 * outer * length * inner),))


@cache
def emit_top_k_ir(element: Type, largest: bool) -> str:
    """`top_k(context)`: the first `kept` elements of each line in descending order (`largest`) or ascending, and their indices as i64.

    An entry of a short value is one i64, so that one comparison orders entries: the value above, and below it the index, inverted: the first of
    equal values is the greater entry. The indices of the result are the heap's memory: its root is the least of the entries, which a greater one
    replaces.
    """
    module = Module()
    with line_kernel(module, "top_k", ("source", "values", "indices"), ("kept",)) as (f, w, for_lines):
        source, values, indices = w.source.as_pointer(element), w.values.as_pointer(element), w.indices.as_pointer(INT64)

        def emit(group: Value, line: Value, lanes: int) -> None:
            x = source.at(group * (w.length * w.inner) + line)
            start = group * (w.kept * w.inner) + line
            long = element.bytes == 8
            follows = _make_order(x, w.inner, largest) if long else _is_less
            heap = _Heap(f, indices.at(start), w.inner, follows)

            def make_entry(index: Value) -> Value:
                return index if long else _make_entry(f, x.load(index * w.inner), index, largest)

            with f.loop(0, w.kept) as first:
                heap.store(first.index, make_entry(first.index))
            with f.loop(0, w.kept >> 1) as nodes:
                root = (w.kept >> 1) - 1 - nodes.index
                heap.sink(root, heap.load(root), w.kept)
            with f.loop(w.kept, w.length) as rest:
                entry = make_entry(rest.index)
                with f.when(follows(heap.load(0), entry)):
                    heap.sink(0, entry, w.kept)
            with f.loop(1, w.kept) as sorted_:
                last = w.kept - sorted_.index
                entry = heap.load(last)
                heap.store(last, heap.load(0))
                heap.sink(0, entry, last)
            with f.loop(0, w.kept) as results:
                index = heap.load(results.index)
                if not long:
                    index = (index & 0xFFFFFFFF) ^ 0xFFFFFFFF
                    heap.store(results.index, index)
                values.store(x.load(index * w.inner), start + results.index * w.inner)

        for_lines(1, emit)
    return str(module)


def _make_entry(f: Function, x: Value, index: Value, largest: bool) -> Value:
    """Greater for values that come first. Zeros of both signs are equal; NaN is above all numbers."""
    if x.type == FLOAT:
        bits = (x + 0.0).convert("bitcast", INT32)
        bits = bits ^ (f.emit(INT32, f"ashr {bits}, 31", bits) & 0x7FFFFFFF)
        value = f.select(x.is_nan(), f.value(0x7FFFFFFF, INT32), bits).convert("sext", INT64)
    else:
        value = x.convert("sext", INT64)
    value = value if largest else value ^ -1
    return (value << 32) | (index ^ 0xFFFFFFFF)


def _is_less(a: Value, b: Value) -> Value:
    return a < b


def _make_order(x: Pointer, step: Value, largest: bool) -> Callable[[Value, Value], Value]:
    """A function of two indices of a line: true if the first element comes after the second in the result."""

    def follows(a: Value, b: Value) -> Value:
        u, v = x.load(a * step), x.load(b * step)
        smaller, equal = (u < v if largest else u > v), u.equals(v)
        if x.type.is_float:  # NaN is above all numbers
            first, second = u.is_nan(), v.is_nan()
            last, other = (second, first) if largest else (first, second)
            smaller, equal = smaller | (last & (other ^ 1)), equal | (first & second)
        return smaller | (equal & (a > b))

    return follows


class _Heap:
    """A binary heap of entries that are `step` words apart; `is_less(a, b)` compares two. Each node is at most its children."""

    def __init__(self, f: Function, memory: Pointer, step: Value, is_less: Callable[[Value, Value], Value]) -> None:
        self._f, self._memory, self._step, self._is_less = f, memory, step, is_less

    def load(self, node: Value | int) -> Value:
        return self._memory.load(self._f.value(node) * self._step)

    def store(self, node: Value | int, entry: Value) -> None:
        self._memory.store(entry, self._f.value(node) * self._step)

    def sink(self, root: Value | int, entry: Value, size: Value) -> None:
        """Places `entry` in the tree of `root`, whose own entry is dropped, in a heap of `size` nodes."""
        f = self._f
        with f.repeat(f.value(root)) as loop:
            (node,) = loop.values
            child = node * 2 + 1
            inside = child < size
            child = f.select(inside, child, node)
            second = f.select(child + 1 < size, child + 1, child)
            second = f.select(inside, second, node)
            child = f.select(self._is_less(self.load(second), self.load(child)), second, child)
            least = self.load(child)
            descends = inside & self._is_less(least, entry)
            self.store(node, f.select(descends, least, entry))
            loop.repeat_if(descends, child)

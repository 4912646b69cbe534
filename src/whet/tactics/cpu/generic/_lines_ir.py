"""Loops along one axis as LLVM IR: lines of elements that are `inner` apart. Neighbouring lines are computed in vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import Function, Module, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._loops import list_context_words

BLOCK = 64  # lines of an item
LINE_NUMBERS = ("length", "inner", "blocks")
"""Of the context of `line_kernel`: elements of a line, lines that are neighbours (elements between those of a line), blocks of neighbours."""


def count_line_items(outer: int, inner: int) -> tuple[int, int]:
    """(items, blocks) for `outer` groups of `inner` lines."""
    blocks = -(-inner // BLOCK)
    return outer * blocks, blocks


@contextmanager
def line_kernel(
    module: Module, name: str, places: Sequence[str], numbers: Sequence[str] = ()
) -> Iterator[tuple[Function, SimpleNamespace, Callable[[int, Callable[[Value, Value, int], None]], None]]]:
    """`void name(i64* context)` with one item per group of lines and block of them. Yields the function, the context's words, and a function
    `for_lines(lanes, body)` that emits `body(group, line, lanes)` for `lanes` neighbouring lines at once, and for the rest one by one (lanes 1)."""
    with parallel_kernel(module, name, list_context_words(places, (*LINE_NUMBERS, *numbers)), "items") as (f, w), f.loop(w.begin, w.end) as items:
        group, block = items.index // w.blocks, items.index % w.blocks
        begin = block * BLOCK
        end = f.minimum(begin + BLOCK, w.inner)

        def for_lines(lanes: int, body: Callable[[Value, Value, int], None]) -> None:
            if lanes == 1:
                with f.loop(begin, end) as one:
                    body(group, one.index, 1)
                return
            with f.loop(begin, end - (lanes - 1), step=lanes) as many:
                body(group, many.index, lanes)
            with f.loop(many.index, end) as one:
                body(group, one.index, 1)

        yield f, w, for_lines


def iota(f: Function, type: Type, lanes: int) -> Value:
    """0, 1, 2, ... in lanes."""
    return f.vector(range(lanes), type) if lanes > 1 else f.value(0, type)


def spread(value: Value, lanes: int) -> Value:
    """A scalar in every lane."""
    return value.broadcast(lanes) if lanes > 1 else value


def extract(f: Function, x: Value, lane: int) -> Value:
    return x if x.lanes == 1 else f.emit(Type(x.type.element), f"extractelement {x}, i32 {lane}", x)

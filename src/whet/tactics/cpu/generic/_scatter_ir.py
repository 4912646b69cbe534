"""Updates of a tensor at computed indices as LLVM IR: of whole rows (ScatterND), and of single elements of lines (ScatterElements)."""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import INT64, Function, Module, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._loops import count_lanes, list_context_words

PLACES = ("at", "updates", "target", "fault")
FAULT = PLACES.index("fault")


@cache
def emit_scatter_rows_ir(element: Type, indices: Type, axes: int, reduction: str) -> str:
    """`scatter_rows(context)`: rows of the target at `axes` indices each are combined with those of the updates; one item per column.

    Numbers: rows of the updates, columns, and for each index the size of its axis and its step in rows. Every thread takes all rows in order, so that
    the last of several updates of a row counts. Indices out of range set the fault word.
    """
    words = list_context_words(PLACES, ("rows", *(f"{name}{k}" for name in ("size", "step") for k in range(axes))))
    module = Module()
    with parallel_kernel(module, "scatter_rows", words, "items") as (f, w):
        updates, target, at = w.updates.as_pointer(element), w.target.as_pointer(element), w.at.as_pointer(indices)
        with f.loop(0, w.rows) as rows:
            row, outside = f.value(0), f.value(0, Type("i1"))
            for k in range(axes):
                index, wrong = _load_index(f, at.load(rows.index * axes + k), getattr(w, f"size{k}"))
                row, outside = row + index * getattr(w, f"step{k}"), outside | wrong
            with f.when(outside):
                w.fault.as_pointer(INT64).store(f.value(1))
            x, y, lanes = updates.at(rows.index * w.items), target.at(f.select(outside, 0, row) * w.items), count_lanes(element)
            with f.when(outside ^ 1):
                with f.loop(w.begin, w.end - (lanes - 1), step=lanes) as many:
                    y.store(_combine(f, reduction, y.load(many.index, lanes), x.load(many.index, lanes)), many.index)
                with f.loop(many.index, w.end) as one:
                    y.store(_combine(f, reduction, y.load(one.index), x.load(one.index)), one.index)
    return str(module)


@cache
def emit_scatter_lines_ir(element: Type, indices: Type, axes: int, reduction: str) -> str:
    """`scatter_lines(context)`: elements of lines of the target are combined with updates, in order; one item per line of the indices.

    Numbers: elements of a line of indices and their distance; elements of a line of the target and their distance; for each of `axes` other axes the
    indices' size and stride, and the target's stride. Indices out of range set the fault word.
    """
    numbers = ("count", "at_step", "length", "step", *(f"{name}{k}" for name in ("size", "at_stride", "stride") for k in range(axes)))
    module = Module()
    with parallel_kernel(module, "scatter_lines", list_context_words(PLACES, numbers), "items") as (f, w):
        updates, target, at = w.updates.as_pointer(element), w.target.as_pointer(element), w.at.as_pointer(indices)
        with f.loop(w.begin, w.end) as lines:
            position, first, own = lines.index, f.value(0), f.value(0)
            for k in reversed(range(axes)):
                size = getattr(w, f"size{k}")
                index = position % size if k else position
                position = position // size if k else position
                first, own = first + index * getattr(w, f"stride{k}"), own + index * getattr(w, f"at_stride{k}")
            with f.loop(0, w.count, carried=[own]) as entries:
                place = entries.values[0]
                index, outside = _load_index(f, at.load(place), w.length)
                with f.when(outside):
                    w.fault.as_pointer(INT64).store(f.value(1))
                with f.when(outside ^ 1):
                    y = target.at(first + index * w.step)
                    y.store(_combine(f, reduction, y.load(), updates.load(place)))
                entries.carry(place + w.at_step)
    return str(module)


def _load_index(f: Function, index: Value, size: Value) -> tuple[Value, Value]:
    """(an index, counted from the end if it is negative; whether it is out of range)."""
    index = index if index.type == INT64 else index.convert("sext", INT64)
    index = f.select(index < 0, index + size, index)
    return index, (index < 0) | (index >= size)


def _combine(f: Function, reduction: str, old: Value, new: Value) -> Value:
    """A NaN makes the extreme of two values NaN."""
    match reduction:
        case "add":
            return old + new
        case "mul":
            return old * new
        case "max" | "min":
            better = new > old if reduction == "max" else new < old
            return f.select(better | new.is_nan() if new.type.is_float else better, new, old)
    return new

"""A copy with other strides as LLVM IR: four axes in the order of the result."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

AXES = 4
WORDS = (
    "x", "y", *(f"{name}{k}" for name in ("size", "step", "out") for k in range(AXES)), "x_first", "y_first", "lines", *LAST_WORDS,
)  # fmt: skip
"""The context: addresses; sizes, and strides of the source and of the result in elements; the first element of each; lines, the product of the first
two sizes."""


@cache
def emit_strided_copy_ir(element: str, lanes: int, transposed: bool = False, width: int = 0, zeros: int = 0) -> str:
    """`strided_copy(context)`: elements of an integer type as long as the copied ones, `lanes` at once if both last strides are 1 (`lanes` above 1).

    `transposed`: the source is contiguous along the third axis, the result along the last: tiles of `lanes` x `lanes` elements are transposed in
    registers. `width`: the last size, if it is small; `zeros` follow each such row of the result.
    """
    module = Module()
    with parallel_kernel(module, "strided_copy", WORDS, "lines") as (f, w):
        x_all, y_all = (word.as_pointer(Type(element)).at(first) for word, first in ((w.x, w.x_first), (w.y, w.y_first)))
        with f.loop(w.begin, w.end) as lines:
            outer, inner = lines.index // w.size1, lines.index % w.size1
            x, y = x_all.at(outer * w.step0 + inner * w.step1), y_all.at(outer * w.out0 + inner * w.out1)
            if transposed:
                _copy_tiles(f, w, x, y, lanes)
            else:
                with f.loop(0, w.size2) as rows:
                    row, out = x.at(rows.index * w.step2), y.at(rows.index * w.out2)
                    if width:
                        _copy_short_row(row, out, w, lanes, width)
                        for k in range(width, width + zeros):
                            out.store(0, k)
                    else:
                        _copy_row(f, row, out, w, lanes)
    return str(module)


def _copy_row(f: Function, x: Pointer, y: Pointer, w: SimpleNamespace, lanes: int) -> None:
    whole = w.size3 - w.size3 % lanes if lanes > 1 else f.value(0)
    if lanes > 1:
        with f.loop(0, whole, step=lanes) as many:
            y.store(x.load(many.index, lanes), many.index)
    with f.loop(whole, w.size3) as one:
        y.store(x.load(one.index * w.step3), one.index * w.out3)


def _copy_short_row(x: Pointer, y: Pointer, w: SimpleNamespace, lanes: int, width: int) -> None:
    """A row of known length, without a loop: vectors, then vectors of half the length, and so on."""
    at, count = 0, max(lanes, 1)
    while at < width:
        while count > width - at:
            count //= 2
        y.store(x.load(at if lanes > 1 else w.step3 * at, count), at if lanes > 1 else w.out3 * at)
        at += count


def _copy_tiles(f: Function, w: SimpleNamespace, x: Pointer, y: Pointer, lanes: int) -> None:
    """The last two axes in tiles, then what is left of them element by element."""
    whole_rows, whole = w.size2 - w.size2 % lanes, w.size3 - w.size3 % lanes
    with f.loop(0, whole_rows, step=lanes) as rows:
        with f.loop(0, whole, step=lanes) as columns:
            tile = x.at(columns.index * w.step3).at(rows.index)
            out = y.at(rows.index * w.out2).at(columns.index)
            for k, row in enumerate(transpose(f, [tile.at(w.step3 * k).load(0, lanes) for k in range(lanes)])):
                out.at(w.out2 * k).store(row)
        _copy_elements(f, w, x, y, (rows.index, rows.index + lanes), (whole, w.size3))
    _copy_elements(f, w, x, y, (whole_rows, w.size2), (f.value(0), w.size3))


def _copy_elements(f: Function, w: SimpleNamespace, x: Pointer, y: Pointer, rows: tuple[Value, Value], columns: tuple[Value, Value]) -> None:
    with f.loop(*rows) as row, f.loop(*columns) as column:
        y.at(row.index * w.out2).store(x.load(row.index + column.index * w.step3), column.index)


def transpose(f: Function, rows: list[Value]) -> list[Value]:
    """The columns of a square tile of as many rows as lanes, a power of two: each step swaps the off-diagonal blocks of pairs of rows."""
    lanes = len(rows)
    half = 1
    while half < lanes:
        low = [i if not i & half else i - half + lanes for i in range(lanes)]
        high = [i + half if not i & half else i + lanes for i in range(lanes)]
        following = list(rows)
        for k in range(lanes):
            if not k & half:
                following[k], following[k + half] = f.shuffle(rows[k], rows[k + half], low), f.shuffle(rows[k], rows[k + half], high)
        rows, half = following, half * 2
    return rows

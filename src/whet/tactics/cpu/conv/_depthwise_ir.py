"""Depthwise convolution with its activation, in blocks of channels, as LLVM IR: a few pixels of a row in registers, taps from L1."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, Function, Module, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_float_chain
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

TILES = (12, 8, 4)
"""Pixels of a row that are accumulated together."""
WHOLE = 14  # the longest row that is one tile
_WORDS = (
    "source", "weights", "target", "height", "width", "rows", "columns", "blocks", "pad_top", "pad_left", "left", "right", "items", "share",
)  # fmt: skip
"""The context: addresses; sizes of the image and of the result; blocks of channels; padding; the range of
result columns with all taps inside the image; samples * blocks * rows; items per thread."""


@cache
def emit_depthwise_ir(
    window: int, stride: int, pixels: int, lanes: int, steps: tuple[Step, ...], has_avx512dq: bool, row: tuple[int, int] | None = None
) -> str:
    """`depthwise(context)` for `window` x `window` taps, a stride for both axes, tiles of `pixels` and an epilogue without a residual; blocks have
    `lanes` channels.

    A block's weights are its taps, row by row, then its biases. The columns between `left` and `right` (at least `pixels`) are
    computed in tiles, the last of which overlaps the one before; the other columns one by one, over the taps inside the image. `row`: width of the
    image and left padding if a tile is a whole row of the result: its taps outside the image are left out.
    """
    module = Module()
    with parallel_kernel(module, "depthwise", _WORDS, "items") as (f, words):
        activations = Activations(f, has_avx512dq, lanes)
        _emit_rows(f, words, lambda x: emit_float_chain(f, activations, steps, x, None), window, stride, pixels, lanes, row)
    return str(module)


def _emit_rows(
    f: Function, w: SimpleNamespace, finish: Callable[[Value], Value], window: int, stride: int, pixels: int, lanes: int,
    row_form: tuple[int, int] | None,
) -> None:  # fmt: skip
    source, weights, target = (word.as_pointer(FLOAT) for word in (w.source, w.weights, w.target))
    line = w.width * lanes
    plane = w.height * line
    out_line = w.columns * lanes
    last_tile = w.right - pixels
    edges = w.left + (w.columns - w.right)
    with f.loop(w.begin, w.end) as items:
        row, n = items.index % w.rows, items.index // w.rows
        block = n % w.blocks
        x = source.at(n * plane)
        taps = weights.at(block * ((window * window + 1) * lanes))
        bias = taps.load(window * window * lanes, lanes)
        y = target.at(items.index * out_line)
        top = row * stride - w.pad_top
        first_row = f.maximum(0 - top, 0)
        end_row = f.minimum(w.height - top, window)

        def tile(column: Value) -> None:
            x_tile, y_tile = x.at((column * stride - w.pad_left) * lanes), y.at(column * lanes)
            with f.loop(first_row, end_row, carried=[bias] * pixels, at_least_once=True) as rows:
                x_row = x_tile.at((top + rows.index) * line)
                row_taps = taps.at(rows.index * (window * lanes))
                sums = list(rows.values)
                for t in range(window):
                    weight = row_taps.load(t * lanes, lanes)
                    for j in range(pixels):
                        if row_form is None or 0 <= j * stride + t - row_form[1] < row_form[0]:
                            sums[j] = f.fma(x_row.load((j * stride + t) * lanes, lanes), weight, sums[j])
                rows.carry(*sums)
            for j in range(pixels):
                y_tile.store(finish(rows.results[j]), j * lanes)

        def emit_edge(column: Value) -> None:
            left = column * stride - w.pad_left
            first_tap = f.maximum(0 - left, 0)
            end_tap = f.minimum(w.width - left, window)
            with f.loop(first_row, end_row, carried=[bias], at_least_once=True) as rows:
                row_offset, tap_row = (top + rows.index) * line, rows.index * window
                with f.loop(first_tap, end_tap, carried=rows.values, at_least_once=True) as columns:
                    number = x.load(row_offset + (left + columns.index) * lanes, lanes)
                    weight = taps.load((tap_row + columns.index) * lanes, lanes)
                    columns.carry(f.fma(number, weight, columns.values[0]))
                rows.carry(*columns.results)
            y.store(finish(rows.results[0]), column * lanes)

        if row_form is not None:
            tile(f.value(0))
        else:
            with f.loop(w.left, w.right, step=pixels) as tiles:
                tile(f.minimum(tiles.index, last_tile))
            with f.loop(0, edges) as others:
                emit_edge(f.select(others.index < w.left, others.index, others.index - w.left + w.right))

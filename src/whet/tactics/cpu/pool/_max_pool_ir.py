"""Max pooling in blocks of channels, as LLVM IR: separable, along the rows of a plane into scratch memory, then along the columns.

This takes 2 k instead of k x k comparisons per window. Where strides leave fewer windows than that saves, each window is read as a whole, without
scratch memory. An index outside the image is clamped to the image's edge, which is in the same window if the
padding is smaller than the window, so the result is unchanged and no pixel needs special code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from whet.tactics.cpu._llvm.builder import FLOAT, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

WORDS = ("source", "target", "scratch", "height", "width", "rows", "columns", "planes", "share")
"""The context: addresses; sizes of the image and of the result; samples * blocks of channels; items per thread."""
WHOLE_WORDS = ("source", "target", "height", "width", "rows", "columns", "items", "share")
"""The same for windows read as a whole; items are rows of the result."""


@dataclass(frozen=True)
class Axis:
    """Windows along rows or along columns."""

    window: int
    stride: int
    pad: int  # before the first element


@cache
def pool_ir(down: Axis, across: Axis, lanes: int) -> str:
    """`pool(context)` for blocks of `lanes` channels. The maximum of NaN and a number is the number; a window of NaN gives the lowest finite number
    (onednn/_nonfinite.KERNELS)."""
    module = Module()
    along_row, along_column = _pool_axis(module, "across", across, lanes), _pool_axis(module, "down", down, lanes)
    with parallel_kernel(module, "pool", WORDS, "planes") as (f, w):
        source, target, scratch = (word.as_pointer(FLOAT) for word in (w.source, w.target, w.scratch))
        in_line = w.width * lanes
        in_plane = w.height * in_line
        line = w.columns * lanes
        scratch_plane, plane = w.height * line, w.rows * line
        last_column, last_row = w.width - 1, w.height - 1
        with f.loop(w.begin, w.end) as planes:
            x, rows_pooled, y = source.at(planes.index * in_plane), scratch.at(planes.index * scratch_plane), target.at(planes.index * plane)
            f.call(along_row, x, rows_pooled, w.columns, w.height, lanes, in_line, lanes, line, last_column)
            f.call(along_column, rows_pooled, y, w.rows, w.columns, line, lanes, line, lanes, last_row)
    return str(module)


@cache
def emit_whole_pool_ir(down: Axis, across: Axis, lanes: int) -> str:
    """`pool(context)`, with all elements of a window at once."""
    module = Module()
    with parallel_kernel(module, "pool", WHOLE_WORDS, "items") as (f, w):
        source, target = (word.as_pointer(FLOAT) for word in (w.source, w.target))
        line = w.width * lanes
        lowest = f.vector([float(np.finfo(np.float32).min)] * lanes)
        with f.loop(w.begin, w.end) as items:
            row, plane = items.index % w.rows, items.index // w.rows
            image, y = source.at(plane * (w.height * line)), target.at(items.index * (w.columns * lanes))
            lines = [image.at(_clamp(f, row * down.stride - down.pad + k, w.height) * line) for k in range(down.window)]
            with f.loop(0, w.columns, at_least_once=True) as columns:
                first = columns.index * across.stride - across.pad
                largest: Value = lowest
                for k in range(across.window):
                    offset = _clamp(f, first + k, w.width) * lanes
                    for pointer in lines:
                        largest = f.maximum(pointer.load(offset, lanes), largest)
                y.store(largest, columns.index * lanes)
    return str(module)


def _clamp(f: Function, index: Value, size: Value) -> Value:
    return f.minimum(f.maximum(index, 0), size - 1)


def _pool_axis(module: Module, name: str, axis: Axis, lanes: int) -> Function:
    """`name(x, y, count, lines, x_step, x_line, y_step, y_line, last)`: `count` windows along one axis, for `lines` rows or columns. x_step and
    y_step are strides in floats along the axis, x_line and y_line across it; `last` is the last input index."""
    with module.function(name, ["float*", "float*", *["i64"] * 7]) as f:
        x, y, count, lines, x_step, x_line, y_step, y_line, last = f.arguments
        assert isinstance(x, Pointer)
        assert isinstance(y, Pointer)
        lowest = f.vector([float(np.finfo(np.float32).min)] * lanes)
        with f.loop(0, count, at_least_once=True) as windows:
            first = windows.index * axis.stride - axis.pad
            inputs = [x.at(f.minimum(f.maximum(first + k, 0), last) * x_step) for k in range(axis.window)]
            output = y.at(windows.index * y_step)
            with f.loop(0, lines, at_least_once=True) as line:
                x_offset, y_offset = line.index * x_line, line.index * y_line
                largest: Value = lowest
                for pointer in inputs:
                    largest = f.maximum(pointer.load(x_offset, lanes), largest)
                output.store(largest, y_offset)
    return f

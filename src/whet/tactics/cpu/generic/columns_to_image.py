"""Col2Im of images with one or two axes in f32. For coverage: otherwise NumPy computes it; ONNX Runtime takes half of its time."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.ops._window import compute_out_size
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT64, Module, Type
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, count_lanes, list_context_words

_WORDS = 6  # of a block's position: see `emit_columns_to_image_ir`
_MOST = 4096  # positions in a block


@tactic
class ColumnsToImage(LoopTactic):
    ops = ("Col2Im",)

    def refuses_types(self, layer: Layer) -> str | None:
        if not layer.needs(2).is_constant:
            return "its block is computed at run time"
        return None if layer.needs(0).dtype.name == "f32" else "computes in f32"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        image = static_shape(layer.outputs[0].shape)
        block = [int(n) for n in np.reshape(layer.needs(2).array(), -1)]
        axes = len(block)
        if axes > 2 or prod(block) > _MOST:
            return f"an image has {axes} axes, a block {prod(block)} positions"
        a, lead = layer.attrs, 2 - axes
        sizes, blocks = [*([1] * lead), *image[2:]], [*([1] * lead), *block]
        strides, dilations = ([*([1] * lead), *(a.get(name) or (1,) * axes)] for name in ("strides", "dilations"))
        pads = list(a.get("pads") or (0,) * (2 * axes))
        before, after = [*([0] * lead), *pads[:axes]], [*([0] * lead), *pads[axes:]]
        counts = static_shape(tuple(compute_out_size(*n) for n in zip(sizes, blocks, strides, dilations, before, after, strict=True)))
        positions = list[int]()
        for position in product(*map(range, blocks)):
            for axis in range(2):
                first = position[axis] * dilations[axis] - before[axis]
                begin = max(-(first // strides[axis]), 0)
                end = max(min((sizes[axis] - 1 - first) // strides[axis] + 1, counts[axis]), begin)
                positions += [begin, end, first]
        ir = emit_columns_to_image_ir(strides[1] == 1)
        planes, columns = image[0] * image[1], prod(blocks) * prod(counts)
        numbers = (*sizes, *counts, *strides, prod(blocks))
        launch = Launch("columns_to_image", ir, (("input", 0), ("table", 0), ("output", 0)), planes, numbers, work=planes * columns)
        return Loops((launch,), (np.array(positions, np.int64),), rtol=1e-6)


@cache
def emit_columns_to_image_ir(contiguous: bool) -> str:
    """`columns_to_image(context)`: one item per image: zeros, then the columns of each position in a block are added.

    The table has for each position, for each axis: the first and last block (exclusive) that put it into the image, and the index in the image of
    the position in block 0. Numbers: sizes of the image, of the array of blocks, their strides, positions in a block. `contiguous`: a stride of 1.
    """
    numbers = ("height", "width", "rows", "columns", "stride", "step", "positions")
    module, lanes = Module(), count_lanes(FLOAT)
    with parallel_kernel(module, "columns_to_image", list_context_words(("source", "table", "target"), numbers), "items") as (f, w):
        table, pixels, blocks = w.table.as_pointer(INT64), w.height * w.width, w.rows * w.columns
        with f.loop(w.begin, w.end) as items:
            y = w.target.as_pointer(FLOAT).at(items.index * pixels)
            with f.loop(0, pixels - (lanes - 1), step=lanes) as zeros:
                y.store(f.value(0.0, Type(FLOAT.element, lanes)), zeros.index)
            with f.loop(zeros.index, pixels) as zero:
                y.store(f.value(0.0, FLOAT), zero.index)
            with f.loop(0, w.positions) as positions:
                x = w.source.as_pointer(FLOAT).at((items.index * w.positions + positions.index) * blocks)
                first_row, end_row, top, first, end, left = (table.load(positions.index * _WORDS + k) for k in range(_WORDS))
                with f.loop(first_row, end_row) as rows:
                    source = x.at(rows.index * w.columns)
                    target = y.at((rows.index * w.stride + top) * w.width + left)
                    begin = first
                    if contiguous:
                        with f.loop(begin, end - (lanes - 1), step=lanes) as many:
                            target.store(target.load(many.index, lanes) + source.load(many.index, lanes), many.index)
                        begin = many.index
                    with f.loop(begin, end) as one:
                        at = one.index * w.step
                        target.store(target.load(at) + source.load(one.index), at)
    return str(module)

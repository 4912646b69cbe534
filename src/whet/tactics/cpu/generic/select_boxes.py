"""SelectBoxes, which NonMaxSuppression runs as. The candidates of a class are sorted by score, then compared with the selected boxes."""

from __future__ import annotations

import numpy as np

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, Place
from whet.tactics.cpu.generic._select_boxes_ir import COUNTERS, NAMES, emit_rows_ir, emit_select_ir

_MOST_THREADS = 64  # with memory of their own
_MOST_BOXES = 1 << 24  # of all classes: their indices have 32 bits, and the memory is bounded
_TYPES = (("f32",), ("f32",), ("i64", "i32"), ("f32",), ("f32",))


@tactic
class SelectBoxes(LoopTactic):
    ops = ("SelectBoxes",)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(layer.inputs) if t is not None)

    def refuses_types(self, layer: Layer) -> str | None:
        if any(t is not None and t.dtype.name not in _TYPES[i] for i, t in enumerate(layer.inputs)):
            return "takes boxes and scores in f32"
        return "selects no box" if layer.input(2) is None else None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        samples, classes, count = static_shape(layer.needs(1).shape)
        rows, groups = layer.attrs["rows"], samples * classes
        limit = rows // groups
        if rows > _MOST_BOXES or count > _MOST_BOXES:
            return f"selects up to {rows} of {count} boxes"
        step = -(-groups // _MOST_THREADS)
        work = -(-(16 * count + 4 * COUNTERS + 4 * len(NAMES) * (limit + 2 * LANES)) // 64) * 64  # bytes of a thread
        counts = -(-4 * rows // 64) * 64
        start = counts + -(-8 * groups // 64) * 64
        has_iou, has_least = (layer.input(i) is not None for i in (3, 4))
        reads: list[Place] = [("input", 0), ("input", 1), ("input", 2)]
        reads += [("input", 3) if has_iou else ("table", 0), ("input", 4) if has_least else ("table", 0)]
        scratch: list[Place] = [("scratch", 0), ("scratch", counts), ("scratch", start)]
        select = Launch(
            "select", emit_select_ir(bool(layer.attrs["center_point_box"]), has_least, layer.needs(2).dtype.name == "i64"), (*reads, *scratch),
            groups, (count, classes, limit, work), step, work=12 * groups * count,
        )  # fmt: skip
        lists = Launch("list_rows", emit_rows_ir(), (*scratch[:2], ("output", 0), ("output", 1)), 1, (groups, classes, limit, rows))
        return Loops((select, lists), (np.zeros(1, np.float32),), start + min(groups, _MOST_THREADS) * work)

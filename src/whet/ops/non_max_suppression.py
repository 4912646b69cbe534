"""NonMaxSuppression: for each sample and class the boxes in order of their scores, without those that overlap an earlier one.

boxes[N,B,4], scores[N,C,B], then optional scalars: most boxes of a class (default 0: none), IoU threshold (0), score threshold. The output
[n,3] has rows (sample, class, box). `center_point_box` 0: boxes are two opposite corners (y, x, y, x); 1: (x, y) of the center, width, height.
"""

import numpy as np

from whet.errors import NetworkError
from whet.network import I64, Layer, TensorType
from whet.ops._data_sized import make_size_symbol, register_data_sized_op
from whet.ops._types import may_equal


def infer(layer):
    check_boxes(layer)
    return TensorType(I64, (make_size_symbol(layer), 3))


def check_boxes(layer):
    """Raises NetworkError unless the inputs are boxes, scores and single values."""
    boxes, scores = layer.inputs[:2]
    if boxes.type.rank != 3 or scores.type.rank != 3 or not may_equal(boxes.shape[-1:], (4,)):
        raise NetworkError(f"takes boxes [N,B,4] and scores [N,C,B], not {boxes.type} and {scores.type}")
    if not may_equal((boxes.shape[0], boxes.shape[1]), (scores.shape[0], scores.shape[2])):
        raise NetworkError(f"boxes {boxes.type} and scores {scores.type} are for different samples or boxes")
    for t in layer.inputs[2:]:
        if t is not None and t.type.static and t.type.elements != 1:
            raise NetworkError(f"takes one value for %{t.name}, not {t.type}")


def compute_reference(layer, boxes, scores, most=None, iou=None, least=None):
    return select_boxes(boxes, scores, 0 if most is None else int(np.reshape(most, ())), iou, least, layer.attrs["center_point_box"])


def bound_size(layer, boxes, scores, most=None, iou=None, least=None):
    """SelectBoxes with a row for each box that may be selected, for these inputs; None if no box is."""
    samples, classes, count = scores.shape
    limit = 0 if most is None else min(max(int(np.reshape(most, ())), 0), count)
    rows = samples * classes * limit
    return Layer("SelectBoxes", layer.name, layer.inputs, {**layer.attrs, "rows": rows}) if rows else None


def select_boxes(boxes, scores, limit, iou, least, centered):
    """Rows [n,3] of selected boxes, at most `limit` of each class. Overlaps are computed in float32, whatever the types of the inputs."""
    boxes, scores = np.asarray(boxes, np.float32), np.asarray(scores, np.float32)
    threshold = np.float32(0 if iou is None else np.reshape(iou, ()))
    corners = _compute_corners(boxes, centered)
    rows = [
        (sample, kind, box)
        for sample in range(scores.shape[0])
        for kind in range(scores.shape[1])
        for box in _select(corners[sample], scores[sample, kind], limit, threshold, None if least is None else np.float32(np.reshape(least, ())))
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def _compute_corners(boxes, centered):
    """Boxes as [N, B, (low, low, high, high)]."""
    a, b = boxes[..., :2], boxes[..., 2:]
    if centered:
        return np.concatenate((a - b / 2, a + b / 2), -1)
    return np.concatenate((np.minimum(a, b), np.maximum(a, b)), -1)


def _select(corners, scores, limit, threshold, least):
    """Indices of the selected boxes of one sample and class, in order of their scores; equal scores in order of the boxes.

    A chunk of candidates at a time: those that overlap selected boxes of earlier chunks are dropped, then the rest are compared with each other."""
    order = np.arange(scores.size) if least is None else np.flatnonzero(scores > least)
    order = order[np.argsort(-scores[order], kind="stable")]
    selected = np.zeros(0, np.int64)
    for begin in range(0, order.size, _CHUNK):
        if selected.size >= limit:
            break
        chunk = order[begin : begin + _CHUNK]
        chunk = chunk[~_find_overlaps(corners[selected], corners[chunk], threshold).any(axis=0)]
        overlaps, alive, kept = _find_overlaps(corners[chunk], corners[chunk], threshold), np.ones(chunk.size, bool), []
        for k in range(chunk.size):
            if alive[k] and selected.size + len(kept) < limit:
                kept.append(k)
                alive &= ~overlaps[k]
        selected = np.concatenate((selected, chunk[kept]))
    return selected.tolist()


def _find_overlaps(a, b, threshold):
    """[boxes of a, boxes of b]: whether the intersection over union of two boxes is above the threshold."""
    low, high = np.maximum(a[:, None, :2], b[:, :2]), np.minimum(a[:, None, 2:], b[:, 2:])
    shared = np.prod(np.maximum(high - low, 0), -1)
    area_a, area_b = (np.prod(x[:, 2:] - x[:, :2], -1) for x in (a, b))
    union = area_a[:, None] + area_b - shared
    with np.errstate(divide="ignore", invalid="ignore"):
        return (shared > 0) & (area_a[:, None] > 0) & (area_b > 0) & (union > 0) & (shared / union > threshold)


_CHUNK = 64  # candidates
_BOXES = np.array([[[0, 0, 1, 1], [0, 0.1, 1, 1.1], [0, -0.1, 1, 0.9], [0, 10, 1, 11], [0, 10.1, 1, 11.1], [0, 100, 1, 101]]], np.float32)
_SCORES = np.array([[[0.9, 0.75, 0.6, 0.95, 0.5, 0.3]]], np.float32)
SAMPLES: tuple[tuple[list, dict], ...] = (
    ([_BOXES, _SCORES, np.array([3]), np.array([0.5], np.float32), np.array([0.0], np.float32)], {}),
    (["f32[2,9,4]", "f32[2,3,9]", np.array(4), np.array(0.3, np.float32)], {"center_point_box": 1}),
    (["f32[1,9,4]", "f32[1,2,9]"], {}),
)

register_data_sized_op(
    "NonMaxSuppression",
    infer,
    compute_reference,
    attrs={"center_point_box": 0},
    bounded=bound_size,
    samples=SAMPLES,
)

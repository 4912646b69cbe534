"""SelectBoxes: NonMaxSuppression with a result of known size: rows[R,3] with the selected boxes, then zeros, and their number.

Inputs are those of NonMaxSuppression. `rows` is R, a multiple of samples * classes: a class of a sample has at most its share of them. The layers
after an engine's kernels run as this op where a kernel computes it (see whet.tactics.host_layers).
"""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._base import NEEDS_INT, op
from whet.ops.non_max_suppression import SAMPLES, check_boxes, select_boxes


def infer(layer):
    check_boxes(layer)
    return [TensorType(I64, (layer.attrs["rows"], 3)), TensorType(I64, ())]


def compute_reference(layer, boxes, scores, most=None, iou=None, least=None):
    share = layer.attrs["rows"] // max(scores.shape[0] * scores.shape[1], 1)
    limit = min(0 if most is None else int(np.reshape(most, ())), share)
    found = select_boxes(boxes, scores, limit, iou, least, layer.attrs["center_point_box"])
    rows = np.zeros((layer.attrs["rows"], 3), np.int64)
    rows[: len(found)] = found
    return rows, np.array(len(found))


def write_onnx(layer, w):
    """NonMaxSuppression, and Pad to the known size."""
    rows, size, pads, number, missing = (w.fresh(f"{layer.name}_{part}") for part in ("rows", "size", "pads", "number", "missing"))
    zeros = w.constant(np.zeros(2, np.int64), "zeros")
    w.node("NonMaxSuppression", [w.name(t) for t in layer.inputs], [rows], name=layer.name, center_point_box=layer.attrs["center_point_box"])
    w.node("Shape", [rows], [size])
    w.node("Gather", [size, w.constant(np.zeros(1, np.int64), "first")], [number])
    w.node("Squeeze", [number], [w.name(layer.outputs[1])])
    w.node("Sub", [w.constant(np.array([layer.attrs["rows"]]), "most"), number], [missing])
    w.node("Concat", [zeros, missing, w.constant(np.zeros(1, np.int64), "last")], [pads], axis=0)
    w.node("Pad", [rows, pads], [w.name(layer.outputs[0])])


op(
    "SelectBoxes",
    infer,
    compute_reference,
    attrs={"center_point_box": 0, "rows": NEEDS_INT},
    onnx_ops=(),
    to_onnx=write_onnx,
    samples=[
        *((inputs, {**attrs, "rows": rows}) for (inputs, attrs), rows in zip(SAMPLES, (3, 24, 18), strict=True)),
        (["f32[2,700,4]", "f32[2,2,700]", np.array([200]), np.array([0.05], np.float32), np.array([-1], np.float32)], {"rows": 800}),
        (["f32[1,300,4]", "f32[1,1,300]", np.array(300), None, np.array([0.5], np.float32)], {"rows": 300, "center_point_box": 1}),
        (["extreme f32[1,60,4]", "f32[1,2,60]", np.array(50), np.array(0.4, np.float32)], {"rows": 100}),
    ],
)

"""RoiAlign: bilinear samples of x [N, C, H, W] in boxes [R, 4] (x1, y1, x2, y2) of the images [R], averaged (or maximal) per bin: [R, C, h, w]."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import op
from whet.ops._types import may_equal, require_float_input, require_one_float_type

MODES, COORDINATES = ("avg", "max"), ("half_pixel", "output_half_pixel")

_MOST_SAMPLES = 256  # per bin and axis; models have 2


def infer(layer):
    t, a = require_float_input(layer), layer.attrs
    require_one_float_type(layer, 1)
    boxes, images = layer.needs(1), layer.needs(2)
    if t.rank != 4 or boxes.type.rank != 2 or boxes.shape[1] != 4 or images.type.rank != 1 or images.dtype.kind != "int":
        raise NetworkError(f"takes [N, C, H, W], boxes [R, 4] and their images [R], not {t}, {boxes.type}, {images.type}")
    if not may_equal(boxes.shape[:1], images.shape):
        raise NetworkError(f"{boxes.shape[0]} boxes lie in {images.shape[0]} images: each box needs its own index")
    if a["output_height"] <= 0 or a["output_width"] <= 0 or a["sampling_ratio"] < 0 or not np.isfinite(a["spatial_scale"]):
        raise NetworkError(f"the output has {a['output_height']} x {a['output_width']} bins, the sampling ratio is {a['sampling_ratio']}")
    if a["sampling_ratio"] > _MOST_SAMPLES:
        raise NetworkError(f"sampling_ratio is {a['sampling_ratio']}; the most samples per bin and axis are {_MOST_SAMPLES}")
    if a["mode"] not in MODES or a["coordinate_transformation_mode"] not in COORDINATES:
        raise NetworkError(f"mode is one of {MODES}, coordinate_transformation_mode of {COORDINATES}")
    return t.with_shape((boxes.shape[0], t.shape[1], a["output_height"], a["output_width"]))


def _compute_sampling_points(start, length, bins, ratio, size):
    """Sampling points of one axis: (low index, high index, weight of high, valid), each [bins, points]."""
    count = ratio if ratio > 0 else max(int(np.ceil(length / bins)), 0)
    at = start + (np.arange(bins)[:, None] + (np.arange(count) + 0.5) / max(count, 1)) * (length / bins)
    valid = (at >= -1) & (at <= size)
    at = np.where(valid, np.maximum(at, 0), 0)
    low = np.minimum(at.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    return low, high, np.where(low >= size - 1, 0, at - low), valid


def compute_reference(layer, x, boxes, images):
    a = layer.attrs
    h, w, ratio = a["output_height"], a["output_width"], a["sampling_ratio"]
    half = a["coordinate_transformation_mode"] == "half_pixel"
    y = np.zeros((len(boxes), x.shape[1], h, w), x.dtype)
    images = np.clip(images, 0, len(x) - 1)  # ONNX leaves indices outside the batch undefined: they read the nearest image
    places = boxes.astype(np.float64) * a["spatial_scale"] - (0.5 if half else 0.0)  # weights are small differences of positions
    for r, (box, image) in enumerate(zip(places, images, strict=True)):
        x1, y1, x2, y2 = box
        height, width = (y2 - y1, x2 - x1) if half else (max(y2 - y1, 1), max(x2 - x1, 1))
        top, bottom, wy, inside_y = (v.reshape(h, 1, -1, 1) for v in _compute_sampling_points(y1, height, h, ratio, x.shape[2]))
        left, right, wx, inside_x = (v.reshape(1, w, 1, -1) for v in _compute_sampling_points(x1, width, w, ratio, x.shape[3]))
        valid = inside_y & inside_x
        corners = ((top, left, (1 - wy) * (1 - wx)), (top, right, (1 - wy) * wx), (bottom, left, wy * (1 - wx)), (bottom, right, wy * wx))
        parts = [np.where(valid, x[image][:, i, j] * weight, 0) for i, j, weight in corners]  # each [C, h, w, points, points]
        if not valid.size:
            continue
        if a["mode"] == "avg":
            y[r] = sum(parts).mean((3, 4))
        else:  # ONNX takes the maximum over the weighted corners, not over their sums
            y[r] = np.maximum.reduce(parts).max((3, 4))
    return y


def read(node, g):
    """Before opset 16 the coordinates were those of output_half_pixel."""
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    return node.add(g, "RoiAlign", *node.inputs, **{"coordinate_transformation_mode": default, **node.attrs})


def to_onnx(layer, w):
    needs_opset(layer, w, 16, "RoiAlign with coordinate_transformation_mode")
    w.node("RoiAlign", [w.name(t) for t in layer.inputs], [w.name(layer.output)], name=layer.name, **layer.attrs)


_BOXES = np.array([[0, 0, 9, 9], [0, 5, 4, 9], [-2, 3, 7.5, 30], [5, 5, 9, 9]], np.float32)

op(
    "RoiAlign",
    infer,
    compute_reference,
    attrs={
        "coordinate_transformation_mode": "half_pixel",
        "mode": "avg",
        "output_height": 1,
        "output_width": 1,
        "sampling_ratio": 0,
        "spatial_scale": 1.0,
    },
    onnx=read,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,3,10,12]", _BOXES, np.array([0, 1, 1, 0])], {"output_height": 5, "output_width": 3, "sampling_ratio": 2}),
        (["f32[1,2,10,10]", _BOXES[:2], np.array([0, 0])], {"output_height": 2, "output_width": 2}),
        (["f32[1,2,10,10]", _BOXES[:2], np.array([0, 0])], {"output_height": 3, "output_width": 3, "mode": "max", "sampling_ratio": 2}),
        (
            ["f32[2,2,10,10]", _BOXES, np.array([0, 0, 1, 1])],
            {"output_height": 4, "output_width": 4, "spatial_scale": 0.5, "coordinate_transformation_mode": "output_half_pixel"},
        ),
    ],
)

"""MaxRoiPool: the maximum of each bin of x [N, C, H, W] in boxes [R, 5] (image, x1, y1, x2, y2, corners included): [R, C, h, w].

Bins of whole elements as in Fast R-CNN (Girshick 2015); an empty bin is 0.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import INTS, op
from whet.ops._types import require_float_input, require_one_float_type

_FARTHEST = 2**30  # of a corner, in elements


def infer(layer):
    t, bins, scale = require_float_input(layer), layer.attrs.get("pooled_shape", ()), layer.attrs["spatial_scale"]
    require_one_float_type(layer, 1)
    boxes = layer.needs(1)
    if t.rank != 4 or boxes.type.rank != 2 or boxes.shape[1] != 5:
        raise NetworkError(f"takes [N, C, H, W] and boxes [R, 5], not {t} and {boxes.type}")
    if len(bins) != 2 or min(bins) < 1 or not np.isfinite(scale):
        raise NetworkError(f"pooled_shape is two positive sizes and spatial_scale a number, not {bins} and {scale}")
    return t.with_shape((boxes.shape[0], t.shape[1], *bins))


def _compute_bounds(first, last, bins, size):
    """The first element and the end of each bin along one axis."""
    length = max(last - first + 1, 1)
    at = np.arange(bins) * length
    low, high = at // bins, -(-(at + length) // bins)
    return np.clip(low + first, 0, size), np.clip(high + first, 0, size)


def compute_reference(layer, x, boxes):
    h, w = layer.attrs["pooled_shape"]
    y = np.zeros((len(boxes), x.shape[1], h, w), x.dtype)
    scaled = np.nan_to_num(boxes[:, 1:].astype(np.float32) * np.float32(layer.attrs["spatial_scale"]))  # halves appear in float32
    corners = np.clip(np.floor(np.abs(scaled) + 0.5) * np.sign(scaled), -_FARTHEST, _FARTHEST).astype(np.int64)  # halves away from zero
    images = np.clip(np.nan_to_num(boxes[:, 0].astype(np.float64)), 0, len(x) - 1).astype(np.int64)
    for r, (image, (x1, y1, x2, y2)) in enumerate(zip(images, corners, strict=True)):
        top, bottom = _compute_bounds(y1, y2, h, x.shape[2])
        left, right = _compute_bounds(x1, x2, w, x.shape[3])
        for i in range(h):
            for j in range(w):
                part = x[image, :, top[i] : bottom[i], left[j] : right[j]]
                if part.size:
                    y[r, :, i, j] = part.max((1, 2))
    return y


_BOXES = np.array([[0, 0, 0, 9, 9], [1, 0, 5, 4, 9], [1, -2, 3, 7.5, 30], [0, 5, 5, 5, 5]], np.float32)

op(
    "MaxRoiPool",
    infer,
    compute_reference,
    attrs={"pooled_shape": INTS, "spatial_scale": 1.0},
    samples=[
        (["f32[2,3,10,12]", _BOXES], {"pooled_shape": (5, 3)}),
        (["f32[2,2,10,10]", _BOXES], {"pooled_shape": (2, 2), "spatial_scale": 0.5}),
    ],
)

"""AveragePool: the mean of each window; padding counts only with `count_include_pad`, elements added by ceil mode never do."""

import numpy as np

from whet.ops._base import op
from whet.ops._types import require_float_input
from whet.ops._window import POOL_ATTRS, infer_pool, pool_couples, pool_of, read_pool


def compute_reference(layer, x):
    pool = pool_of(layer)
    parts = pool.slices(x, 0)
    y = next(parts).copy()
    for part in parts:
        y += part
    ones = np.ones((1, 1, *x.shape[2:]), x.dtype)
    if layer.attrs["count_include_pad"]:
        r = len(pool.kernel)
        unpadded = type(pool)(pool.kernel, pool.strides, pool.dilations, (0,) * 2 * r, False)
        ones = np.ones((1, 1, *(n + pool.pads[i] + pool.pads[r + i] for i, n in enumerate(x.shape[2:]))), x.dtype)
        ones = np.pad(ones, [(0, 0), (0, 0), *((0, e) for e in pool.extra(x.shape[2:]))])
        counts = sum(part[(..., *(slice(0, n) for n in y.shape[2:]))] for part in unpadded.slices(ones, 0))
    else:
        counts = sum(pool.slices(ones, 0))
    return y / counts


def infer(layer):
    require_float_input(layer)
    return infer_pool(layer)


op(
    "AveragePool",
    infer,
    compute_reference,
    attrs={**POOL_ATTRS, "count_include_pad": 0},
    couples=pool_couples,
    zeros=(),
    onnx=read_pool,
    samples=[
        (["f32[2,3,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[2,3,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 0, 1, 1), "count_include_pad": 1}),
        (["f32[1,17,8,8]"], {"kernel_shape": (8, 8)}),
        (["f32[1,4,7,10]"], {"kernel_shape": (3, 2), "strides": (2, 3), "ceil_mode": 1}),
        (["f32[1,4,10]"], {"kernel_shape": (3,), "strides": (2,)}),
        (["f32[1,2,5,6,7]"], {"kernel_shape": (2, 3, 2), "strides": (1, 2, 2)}),
        (["extreme f32[1,16,4,4]"], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["f32[1,2,5,5]"], {"kernel_shape": (2, 2), "strides": (3, 3), "pads": (0, 0, 1, 1), "ceil_mode": 1}),
    ],
)

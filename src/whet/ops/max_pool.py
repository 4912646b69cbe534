"""MaxPool: the maximum of each window; padding is ignored, NaN propagates."""

import numpy as np

from whet.ops._base import op
from whet.ops._window import POOL_ATTRS, infer_pool, pool_couples, pool_of, read_pool


def reference(layer, x):
    if x.dtype.itemsize == 1 and x.dtype.kind not in "iu":  # float8 e4m3 has no infinity to pad with
        return reference(layer, x.astype(np.float32)).astype(x.dtype)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    parts = pool_of(layer).slices(x, lowest)
    y = next(parts).copy()
    for part in parts:
        np.maximum(y, part, out=y)
    return y


op(
    "MaxPool",
    infer_pool,
    reference,
    attrs=POOL_ATTRS,
    couples=pool_couples,
    zeros=(),
    onnx=read_pool,
    samples=[
        (["f32[2,3,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,17,8,8]"], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["f32[1,4,7,10]"], {"kernel_shape": (3, 2), "strides": (2, 3), "ceil_mode": 1}),
        (["f32[1,4,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (0, 0, 1, 1), "ceil_mode": 1}),
        (["f32[1,4,10]"], {"kernel_shape": (3,), "dilations": (2,)}),
        (["f32[1,2,5,6,7]"], {"kernel_shape": (2, 3, 2), "strides": (1, 2, 2)}),
        (["f32[1,8,6,6]"], {"kernel_shape": (5, 5), "pads": (2, 2, 2, 2)}),
        (["extreme f32[1,16,4,4]"], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["i8[1,3,4,4]"], {"kernel_shape": (2, 2)}),
        (["f32[1,2,5,5]"], {"kernel_shape": (2, 2), "strides": (3, 3), "pads": (0, 0, 1, 1), "ceil_mode": 1}),
    ],
)

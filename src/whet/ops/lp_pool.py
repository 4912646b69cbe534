"""LpPool: the p-norm of each window."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._types import require_float_input
from whet.ops._window import POOL_ATTRS, infer_pool, pool_couples, pool_of, read_pool


def compute_reference(layer, x):
    p = layer.attrs["p"]
    return np.power(sum(pool_of(layer).slices(np.abs(x) ** p, 0)), x.dtype.type(1 / p))


def infer(layer):
    if layer.attrs["p"] < 1:
        raise NetworkError(f"p is {layer.attrs['p']}; it must be at least 1")
    require_float_input(layer)
    return infer_pool(layer)


op(
    "LpPool",
    infer,
    compute_reference,
    attrs={**POOL_ATTRS, "p": 2},
    couples=pool_couples,
    zeros=(),
    onnx=read_pool,
    samples=[
        (["f32[2,3,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,5,10]"], {"kernel_shape": (3,), "p": 3}),
    ],
)

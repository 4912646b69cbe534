"""Pow: x^y with broadcasting, in x's type."""

import numpy as np

from whet.network import TensorType
from whet.ops._base import op
from whet.ops._binary import FLOAT_SAMPLES, list_binary_couples
from whet.ops._types import broadcast


def infer(layer):
    x, y = layer.inputs[0], layer.inputs[1]
    return TensorType(x.dtype, broadcast(x.shape, y.shape))


def compute_reference(layer, x, y):
    if y.size == 1 and y.ndim <= x.ndim and x.dtype.kind == "f":  # fast paths: squares and roots are common and pow is slow
        if y.item() == 2:
            return x * x
        if y.item() == 1:
            return x.copy()
    if x.dtype.kind == "i" and y.dtype.kind == "i" and (y < 0).any():
        return np.power(x.astype(np.float64), y).astype(x.dtype)
    return np.power(x, y).astype(x.dtype)


op(
    "Pow",
    infer,
    compute_reference,
    samples=[
        *FLOAT_SAMPLES,
        (["positive f32[3,5]", "f32[3,5]"], {}),
        (["f32[2,3,5]", np.array(2, np.float32)], {}),
        (["extreme f32[4,16]", np.array([2], np.float32)], {}),
        (["positive f32[7]", np.array(0.5, np.float32)], {}),
        (["f32[7]", np.array([2, 3, 0, 1, 1, 2, 4])], {}),
        (["i64[5]", np.array(3)], {}),
    ],
    couples=list_binary_couples,
    pointwise=True,
)

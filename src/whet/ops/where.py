"""Where: x where the condition holds, else y; with broadcasting."""

import numpy as np

from whet.errors import NetworkError
from whet.network import BOOL, TensorType
from whet.ops._base import fold_dims, op
from whet.ops._binary import list_binary_couples
from whet.ops._types import broadcast


def infer(layer):
    c, x, y = layer.inputs
    if c.dtype != BOOL or x.dtype != y.dtype:
        raise NetworkError(f"takes a bool and two tensors of one type, not {c.type}, {x.type}, {y.type}")
    return TensorType(x.dtype, broadcast(broadcast(c.shape, x.shape), y.shape))


op(
    "Where",
    infer,
    lambda layer, c, x, y: np.where(c, x, y),
    samples=[
        (["bool[2,3,4]", "f32[2,3,4]", "f32[2,3,4]"], {}),
        (["bool[3,1]", "extreme f32[2,3,13]", np.array(-np.inf, np.float32)], {}),
        (["bool[5]", "i64[]", "i64[2,1]"], {}),
    ],
    couples=list_binary_couples,
    shape_value=fold_dims,
    pointwise=True,
)

"""OneHot: a new axis of `depth` (input 1), with values[1] (input 2) at the index and values[0] elsewhere."""

import numpy as np

from whet.errors import NetworkError
from whet.network import TensorType
from whet.ops._base import op, require_known_ints


def infer(layer):
    at, values = layer.inputs[0], layer.inputs[2]
    depth = require_known_ints(layer, 1, "depth")
    axis, rank = layer.attrs["axis"], at.type.rank + 1
    if isinstance(depth[0], int) and depth[0] < 0:
        raise NetworkError(f"depth is {depth[0]}")
    if not -rank <= axis < rank or len(depth) != 1 or values.shape != (2,):
        raise NetworkError(f"needs one depth, two values and an axis within rank {rank}, not {depth}, {values.type}, {axis}")
    axis %= rank
    return TensorType(values.dtype, (*at.shape[:axis], depth[0], *at.shape[axis:]))


def compute_reference(layer, at, depth, values):
    depth, axis = int(depth.reshape(-1)[0]), layer.attrs["axis"] % (at.ndim + 1)
    at = at.astype(np.int64)
    at = np.where(at < 0, at + depth, at)
    shape = [1] * (at.ndim + 1)
    shape[axis] = depth
    return np.where(np.expand_dims(at, axis) == np.arange(depth).reshape(shape), values[1], values[0])


op(
    "OneHot",
    infer,
    compute_reference,
    attrs={"axis": -1},
    samples=[
        (["i64[3]", np.array(5), np.array([0, 1], np.float32)], {}),
        (["i64[2,3]", np.array([4]), np.array([-1, 2], np.float32)], {"axis": 1}),
    ],
)

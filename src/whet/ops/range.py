"""Range: start, start + step, ... below the limit; the three scalars must be known at build time."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import TensorType, ceildiv
from whet.ops._base import find_known_values, op


def infer(layer):
    dtype = layer.inputs[0].dtype
    if any(t.dtype != dtype for t in layer.inputs):
        raise NetworkError(f"takes three scalars of one type, not {[str(t.type) for t in layer.inputs]}")
    if all(t.is_constant for t in layer.inputs):
        a, b, c = (t.array().item() for t in layer.inputs)
        if c == 0:
            raise NetworkError("its step is 0")
        return TensorType(dtype, (max(int(np.ceil((b - a) / c)), 0),))
    values = [find_known_values(t) for t in layer.inputs]
    if any(v is None for v in values):
        raise UnsupportedError(f"Range '{layer.name}': its length is computed from data at run time; it must be known from constants and shapes")
    (a,), (b,), (c,) = values
    return TensorType(dtype, (ceildiv(b - a, c),))


op(
    "Range",
    infer,
    lambda layer, a, b, c: np.arange(a.item(), b.item(), c.item(), dtype=a.dtype),
    samples=[
        ([np.array(0), np.array(7), np.array(2)], {}),
        ([np.array(5), np.array(-3), np.array(-1)], {}),
        ([np.array(0.5, np.float32), np.array(3, np.float32), np.array(0.5, np.float32)], {}),
        ([np.array(3), np.array(3), np.array(1)], {}),
    ],
)

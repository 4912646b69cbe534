"""Div: elementwise quotient with broadcasting; integer quotients are truncated."""

import numpy as np

from whet.network import Expr, floordiv
from whet.ops._base import find_known_array, op
from whet.ops._binary import FLOAT_SAMPLES, infer_binary, list_binary_couples


def compute_reference(layer, a, b):
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    q = np.floor_divide(a, b)
    return (q + ((np.remainder(a, b) != 0) & ((a < 0) != (b < 0)))).astype(a.dtype)


def shape_value(layer):
    """Quotients of dims, which are never negative; for floats only if the division is exact."""
    a, b = (find_known_array(t) for t in layer.inputs)
    if a is None or b is None or not (a.dtype == object or b.dtype == object):
        return [None]
    pairs = [(x, y) for x, y in np.nditer([a, b], ["refs_ok"], order="C")] if a.shape == b.shape == () else list(np.broadcast(a, b))
    out = []
    for x, y in ((_convert_to_dim(x), _convert_to_dim(y)) for x, y in pairs):
        if x is None or y is None or (isinstance(y, int) and y <= 0):
            return [None]
        q = floordiv(x, y)
        if layer.inputs[0].dtype.is_float and q * y != x:
            return [None]
        out.append(q)
    return [tuple(out)]


def _convert_to_dim(v):
    v = v.item() if isinstance(v, np.ndarray | np.generic) else v
    return v if isinstance(v, Expr) else int(v) if v == int(v) else None


op(
    "Div",
    infer_binary,
    compute_reference,
    samples=[*FLOAT_SAMPLES, (["i64[3,4]", np.array([2, 3, 7, 1])], {}), (["i32[5]", np.array([[2], [-2]], np.int32)], {})],
    couples=list_binary_couples,
    shape_value=shape_value,
    pointwise=True,
)

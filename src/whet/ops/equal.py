"""Equal: true where a equals b; false for NaN."""

import numpy as np

from whet.network import Expr
from whet.ops._base import find_known_array, op
from whet.ops._binary import BOOL_SAMPLES, FLOAT_SAMPLES, INT_SAMPLES, infer_compare, list_binary_couples


def shape_value(layer):
    """Known if both sides are: a symbolic dimension equals itself and no negative number."""
    a, b = (find_known_array(t) for t in layer.inputs)
    if a is None or b is None or not (a.dtype == object or b.dtype == object):
        return [None]
    out = [_compare_dims(x, y) for x, y in np.broadcast(a, b)]
    return [None if None in out else tuple(out)]


def _compare_dims(x, y):
    """1, 0, or None if it depends on a symbol's value."""
    if x == y:
        return 1
    if isinstance(x, Expr) == isinstance(y, Expr):
        return None if isinstance(x, Expr) else 0
    return 0 if (y if isinstance(x, Expr) else x) < 0 else None


op(
    "Equal",
    infer_compare,
    lambda layer, a, b: np.equal(a, b),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES, *BOOL_SAMPLES],
    couples=list_binary_couples,
    shape_value=shape_value,
    pointwise=True,
)

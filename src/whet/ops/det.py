"""Det: determinants of the matrices in the last two axes."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._types import may_equal, require_float_input


def infer(layer):
    t = require_float_input(layer)
    if t.rank < 2 or not may_equal(t.shape[-1:], t.shape[-2:-1]):
        raise NetworkError(f"takes square matrices, not {t}")
    return t.with_shape(t.shape[:-2])


op("Det", infer, lambda layer, x: np.linalg.det(x), samples=[(["f32[3,3]"], {}), (["f32[2,5,4,4]"], {})])

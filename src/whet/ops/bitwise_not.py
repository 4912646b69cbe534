"""BitwiseNot: bitwise complement of integers."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._types import list_same_axis_couples


def infer(layer):
    t = layer.inputs[0].type
    if t.dtype.kind not in ("int", "uint"):
        raise NetworkError(f"takes integers, not {t}")
    return t


op(
    "BitwiseNot",
    infer,
    lambda layer, x: np.bitwise_not(x),
    samples=[(["i64[3,5]"], {}), (["u8[7]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)

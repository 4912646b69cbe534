"""Not: logical negation."""

import numpy as np

from whet.errors import NetworkError
from whet.network import BOOL
from whet.ops._base import op
from whet.ops._types import list_same_axis_couples


def infer(layer):
    t = layer.inputs[0].type
    if t.dtype != BOOL:
        raise NetworkError(f"takes bool, not {t}")
    return t


op(
    "Not",
    infer,
    lambda layer, x: np.logical_not(x),
    samples=[(["bool[3,5]"], {}), (["bool[]"], {}), (["bool[2,3,4,5]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)

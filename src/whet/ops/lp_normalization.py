"""LpNormalization: x divided by its 1- or 2-norm along `axis`; zeros stay zeros."""

import numpy as np

from whet.ops._base import Couple, op
from whet.ops._types import list_same_axis_couples, normalize_axis, require_float_input


def compute_reference(layer, x):
    axis, p = layer.attrs["axis"], layer.attrs["p"]
    norm = np.abs(x).sum(axis=axis, keepdims=True) if p == 1 else np.sqrt((x * x).sum(axis=axis, keepdims=True))
    return np.divide(x, norm, where=norm != 0, out=np.zeros_like(x))



def list_couples(layer):
    """The normalized axis may lose zeros, which do not change the norm."""
    x = layer.inputs[0]
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    return [*list_same_axis_couples(x, layer.output), Couple(x, axis, x, axis, summed=True)]


op(
    "LpNormalization",
    require_float_input,
    compute_reference,
    attrs={"axis": -1, "p": 2},
    couples=list_couples,
    zeros=(),
    samples=[(["f32[3,5,4]"], {}), (["f32[3,7]"], {"p": 1, "axis": 0})],
)

"""LpNormalization: x divided by its 1- or 2-norm along `axis`; zeros stay zeros."""

import numpy as np

from whet.ops._base import Couple, op
from whet.ops._types import axis_of, float_input, same_axes


def reference(layer, x):
    axis, p = layer.attrs["axis"], layer.attrs["p"]
    norm = np.abs(x).sum(axis=axis, keepdims=True) if p == 1 else np.sqrt((x * x).sum(axis=axis, keepdims=True))
    return np.divide(x, norm, where=norm != 0, out=np.zeros_like(x))



def couples(layer):
    """The normalized axis may lose zeros, which do not change the norm."""
    x = layer.inputs[0]
    axis = axis_of(layer.attrs["axis"], x.type.rank)
    return [*same_axes(x, layer.output), Couple(x, axis, x, axis, summed=True)]


op(
    "LpNormalization",
    float_input,
    reference,
    attrs={"axis": -1, "p": 2},
    couples=couples,
    zeros=(),
    samples=[(["f32[3,5,4]"], {}), (["f32[3,7]"], {"p": 1, "axis": 0})],
)

"""MeanVarianceNormalization: normalizes `axes` to mean 0 and variance 1."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import Couple, op
from whet.ops._types import axis_of, float_input


def axes(layer):
    rank = layer.inputs[0].type.rank
    return tuple(axis_of(a, rank) for a in layer.attrs["axes"])


def infer(layer):
    if len(set(axes(layer))) != len(layer.attrs["axes"]):
        raise NetworkError(f"axes {layer.attrs['axes']} repeat an axis")
    return float_input(layer)


def reference(layer, x):
    over = layer.attrs["axes"]
    d = x - x.mean(axis=over, keepdims=True)
    return d / (np.sqrt((d * d).mean(axis=over, keepdims=True)) + x.dtype.type(1e-9))


op(
    "MeanVarianceNormalization",
    infer,
    reference,
    attrs={"axes": (0, 2, 3)},
    statistics=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in axes(layer)],
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(layer.output.type.rank) if i not in axes(layer)],
    samples=[(["f32[2,5,4,3]"], {}), (["f32[2,5,4]"], {"axes": (1, -1)})],
)

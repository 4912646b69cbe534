"""MeanVarianceNormalization: normalizes `axes` to mean 0 and variance 1."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import Couple, op
from whet.ops._types import normalize_axis, require_float_input


def list_axes(layer):
    rank = layer.inputs[0].type.rank
    return tuple(normalize_axis(a, rank) for a in layer.attrs["axes"])


def infer(layer):
    if len(set(list_axes(layer))) != len(layer.attrs["axes"]):
        raise NetworkError(f"axes {layer.attrs['axes']} repeat an axis")
    return require_float_input(layer)


def compute_reference(layer, x):
    over = layer.attrs["axes"]
    d = x - x.mean(axis=over, keepdims=True)
    return d / (np.sqrt((d * d).mean(axis=over, keepdims=True)) + x.dtype.type(1e-9))


op(
    "MeanVarianceNormalization",
    infer,
    compute_reference,
    attrs={"axes": (0, 2, 3)},
    statistics=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in list_axes(layer)],
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(layer.output.type.rank) if i not in list_axes(layer)],
    samples=[(["f32[2,5,4,3]"], {}), (["f32[2,5,4]"], {"axes": (1, -1)})],
)

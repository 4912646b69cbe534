"""GatherElements: y[i, j] = x[at[i, j], j] for axis 0, and so on; negative indices count from the end."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import map_axes
from whet.ops._base import op
from whet.ops._types import normalize_axis


def infer(layer):
    x, at = layer.inputs
    normalize_axis(layer.attrs["axis"], x.type.rank)
    if x.type.rank != at.type.rank or at.dtype.kind != "int":
        raise NetworkError(f"takes integer indices of rank {x.type.rank}, not {at.type}")
    return x.type.with_shape(at.shape)


def compute_reference(layer, x, at):
    axis = layer.attrs["axis"] % x.ndim
    at = np.where(at < 0, at + x.shape[axis], at)
    x = x[tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(at.shape))]
    return np.take_along_axis(x, at, axis)


def list_couples(layer):
    x, at = layer.inputs
    axis, r = normalize_axis(layer.attrs["axis"], x.type.rank), x.type.rank
    of_x = {i: i for i in range(r) if i != axis and x.shape[i] == at.shape[i]}
    return map_axes(x, layer.output, of_x) + map_axes(at, layer.output, {i: i for i in range(r)})


op(
    "GatherElements",
    infer,
    compute_reference,
    attrs={"axis": 0},
    couples=list_couples,
    zeros=(),
    samples=[
        (["f32[3,4]", np.array([[0, 2, -1, 1], [1, 1, 0, 2]])], {}),
        (["extreme f32[2,13]", np.array([[12, 0, -3], [4, 4, 4]])], {"axis": 1}),
    ],
)

"""Gather: the entries of x along `axis` selected by an index tensor of any shape; negative indices count from the end."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import map_axes
from whet.ops._base import fold_dims, op
from whet.ops._types import normalize_axis


def infer(layer):
    x, at = layer.inputs
    if at.dtype.kind != "int":
        raise NetworkError(f"takes indices of type i32 or i64, not {at.type}")
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    n = x.shape[axis]
    if at.is_constant and isinstance(n, int) and at.array().size and not (-n <= at.array().min() and at.array().max() < n):
        raise NetworkError(f"an index is out of range for the {n} entries of axis {axis}")
    return x.type.with_shape((*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]))


def list_couples(layer):
    x, at = layer.inputs
    axis, r = normalize_axis(layer.attrs["axis"], x.type.rank), at.type.rank
    places = {i: i if i < axis else i + r - 1 for i in range(x.type.rank) if i != axis}
    return map_axes(x, layer.output, places) + map_axes(at, layer.output, {i: i + axis for i in range(r)})


def recut(layer, kept_indices):
    """The index, changed to the new positions of the entries that are kept of x's indexed axis."""
    x, at = layer.inputs
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    if (x, axis) not in kept_indices:
        return {}
    places = np.full(x.shape[axis], -1)
    places[kept_indices[x, axis]] = np.arange(len(kept_indices[x, axis]))
    return {1: places[at.array()[kept_indices[layer.output, axis]]].astype(at.dtype.numpy)}


op(
    "Gather",
    infer,
    lambda layer, x, at: np.take(x, at, axis=layer.attrs["axis"]),
    attrs={"axis": 0},
    couples=list_couples,
    zeros=(),
    recut=recut,
    shape_value=lambda layer: fold_dims(layer, 1),
    samples=[
        (["f32[7,4]", np.array([[0, 6], [-1, 3]])], {}),
        (["const f32[11,5]", np.array([1, 10, 0, 2], np.int32)], {}),
        (["f32[2,9,3]", np.array(4)], {"axis": 1}),
        (["f32[2,3,9]", np.array([1, 1, 0])], {"axis": -1}),
        (["extreme f32[3,16]", np.array([2, 0])], {}),
        (["i64[4]", np.array(-2)], {}),
    ],
)

"""Unique: the distinct entries, indices of their first occurrences, the entry of each element, and counts."""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._base import INT
from whet.ops._data_sized import make_size_symbol, register_data_sized_op
from whet.ops._types import normalize_axis


def infer(layer):
    x, axis, n = layer.inputs[0], layer.attrs.get("axis"), make_size_symbol(layer)
    if axis is None:
        shape, elements = (n,), x.type.elements
    else:
        axis = normalize_axis(axis, x.type.rank)
        shape, elements = (*x.shape[:axis], n, *x.shape[axis + 1 :]), x.shape[axis]
    return [x.type.with_shape(shape), TensorType(I64, (n,)), TensorType(I64, (elements,)), TensorType(I64, (n,))]


def compute_reference(layer, x):
    """Unsorted: in order of the first occurrences."""
    axis = layer.attrs.get("axis")
    data = x.astype(np.float64) if x.dtype.kind not in "iufb" else x  # bfloat16 has no sort order in NumPy
    values, first, inverse, counts = np.unique(data, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not layer.attrs["sorted"]:
        order = np.argsort(first)
        values, first, counts = np.take(values, order, axis=axis or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values.astype(x.dtype), *(a.astype(np.int64) for a in (first, inverse, counts))


register_data_sized_op(
    "Unique",
    infer,
    compute_reference,
    attrs={"axis": INT, "sorted": 1},
    samples=[(["i64[3,4]"], {}), (["i64[12]"], {"sorted": 0}), (["i64[5,2]"], {"axis": 0})],
)

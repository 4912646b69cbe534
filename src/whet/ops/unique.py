"""Unique: the distinct entries. Its output shapes depend on the data, so only known data are read."""

import numpy as np

from whet.ops._refused import compute_or_refuse


def _unique(node, x):
    """Distinct entries, index of their first occurrences, entry of each element, counts; unsorted: by first occurrence."""
    axis = node.attrs.get("axis")
    data = x.astype(np.float64) if x.dtype.kind not in "iufb" else x  # bfloat16 has no sort order in NumPy
    values, first, inverse, counts = np.unique(data, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not node.attrs.get("sorted", 1):
        order = np.argsort(first)
        values, first, counts = np.take(values, order, axis=axis or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values.astype(x.dtype), *(a.astype(np.int64) for a in (first, inverse, counts))


compute_or_refuse(
    "Unique", "its output size depends on the data, but an engine needs shapes in advance; compute it outside the model", _unique
)

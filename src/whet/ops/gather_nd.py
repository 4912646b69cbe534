"""GatherND: at[..., :] index x's first axes (after `batch_dims` shared ones); y holds the indexed entries."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.ops._base import op
from whet.ops._types import may_equal


def infer(layer):
    x, at = layer.inputs
    b, k = layer.attrs["batch_dims"], at.shape[-1]
    if not isinstance(k, int):
        raise UnsupportedError(f"GatherND '{layer.name}': the number of axes indexed by {at} is known only at run time")
    if b < 0 or not 1 <= k <= x.type.rank - b or at.dtype.kind != "int" or b >= at.type.rank or not may_equal(at.shape[:b], x.shape[:b]):
        raise NetworkError(f"indices {at.type} with batch_dims={b} do not match {x.type}")
    return x.type.with_shape((*at.shape[:-1], *x.shape[b + k :]))


def compute_reference(layer, x, at):
    b, k = layer.attrs["batch_dims"], at.shape[-1]
    batch = [np.arange(n).reshape([n if i == j else 1 for j in range(at.ndim - 1)]) for i, n in enumerate(x.shape[:b])]
    return x[(*batch, *(at[..., i] for i in range(k)))]


def recut(layer, kept_indices):
    """The index, changed to the new positions of the entries that are kept of x's first axis."""
    x, at = layer.inputs
    if (x, 0) not in kept_indices or not at.is_constant or layer.attrs["batch_dims"]:
        return {}
    index = at.array()[kept_indices[layer.output, 0]]
    places = np.full(x.shape[0], -1, at.dtype.numpy)
    places[kept_indices[x, 0]] = np.arange(len(kept_indices[x, 0]))
    return {1: np.concatenate([places[index[..., :1]], index[..., 1:]], axis=-1)}


op(
    "GatherND",
    infer,
    compute_reference,
    attrs={"batch_dims": 0},
    recut=recut,
    samples=[
        (["f32[3,4]", np.array([[0, 2], [2, -1]])], {}),
        (["f32[3,4,5]", np.array([[[1], [2]]])], {}),
        (["f32[2,3,4]", np.array([[1], [2]])], {"batch_dims": 1}),
        (["extreme f32[3,4]", np.array([[1]])], {}),
    ],
)

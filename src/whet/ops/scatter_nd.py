"""ScatterND: x with updates written at the indices at[..., :] of its first axes; `reduction` combines duplicates."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.ops._base import op
from whet.ops._scatter import check, combine_at
from whet.ops._types import may_equal


def infer(layer):
    x, at, updates = layer.inputs
    k = at.shape[-1]
    check(layer.attrs["reduction"])
    if not isinstance(k, int):
        raise UnsupportedError(f"ScatterND '{layer.name}': the number of axes indexed by {at} is known only at run time")
    want = (*at.shape[:-1], *x.shape[k:])
    if k > x.type.rank or at.dtype.kind != "int" or x.dtype != updates.dtype or not may_equal(want, updates.shape):
        raise NetworkError(f"indices {at.type} and updates {updates.type} do not match {x.type}")
    return x.type


def compute_reference(layer, x, at, updates):
    return combine_at(x, tuple(at[..., i] for i in range(at.shape[-1])), updates, layer.attrs["reduction"])


op(
    "ScatterND",
    infer,
    compute_reference,
    attrs={"reduction": "none"},
    samples=[
        (["f32[3,4]", np.array([[0, 2], [2, -1]]), "f32[2]"], {}),
        (["f32[3,4]", np.array([[2], [0]]), "f32[2,4]"], {}),
        (["f32[3,4]", np.array([[2], [2]]), "f32[2,4]"], {"reduction": "add"}),
        (["extreme f32[3,5]", np.array([[1]]), "f32[1,5]"], {}),
    ],
)

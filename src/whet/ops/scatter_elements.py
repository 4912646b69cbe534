"""ScatterElements: x with updates[i, j] written at [at[i, j], j] for axis 0, and so on; `reduction` combines duplicates."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._scatter import check, combine_at
from whet.ops._types import may_equal, normalize_axis


def infer(layer):
    x, at, updates = layer.inputs
    normalize_axis(layer.attrs["axis"], x.type.rank)
    check(layer.attrs["reduction"])
    if at.type.rank != x.type.rank or not may_equal(at.shape, updates.shape) or at.dtype.kind != "int" or x.dtype != updates.dtype:
        raise NetworkError(f"indices {at.type} and updates {updates.type} do not match {x.type}")
    return x.type


def compute_reference(layer, x, at, updates):
    axis = layer.attrs["axis"] % x.ndim
    where = list(np.ogrid[tuple(slice(0, n) for n in at.shape)])
    where[axis] = np.where(at < 0, at + x.shape[axis], at)
    return combine_at(x, tuple(where), updates, layer.attrs["reduction"])


op(
    "ScatterElements",
    infer,
    compute_reference,
    attrs={"axis": 0, "reduction": "none"},
    onnx_ops=("ScatterElements", "Scatter"),
    samples=[
        (["f32[3,4]", np.array([[0, 2, -1, 1]]), "f32[1,4]"], {}),
        (["f32[2,9]", np.array([[8, 0, 3], [4, 4, 4]]), "f32[2,3]"], {"axis": 1, "reduction": "add"}),
        (["extreme f32[2,13]", np.array([[8, 0], [4, 5]]), "f32[2,2]"], {"axis": -1}),
        (["f32[2,9]", np.array([[8, 8], [4, 4]]), "f32[2,2]"], {"axis": 1, "reduction": "max"}),
    ],
)

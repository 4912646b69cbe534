"""EyeLike: ones on the k-th diagonal of a matrix of x's shape, zeros elsewhere, in type `dtype` (x's without it)."""

import numpy as np

from whet.errors import NetworkError
from whet.network import F32, Layer
from whet.ops._base import DTYPE, op


def infer(layer):
    x = layer.inputs[0]
    if x.type.rank != 2:
        raise NetworkError(f"takes a matrix, not {x.type}")
    return x.type.with_dtype(layer.attrs.get("dtype", x.dtype))


def read(node, g):
    dtype = node.attrs.get("dtype")
    return node.add(g, "EyeLike", node.inputs[0], k=node.attrs.get("k", 0), dtype=None if dtype is None else node.dtype(dtype))


def compute_reference(layer: Layer, x: np.ndarray) -> np.ndarray:
    rows, columns = x.shape
    return np.eye(rows, columns, k=layer.attrs["k"], dtype=layer.attrs["dtype"].numpy if "dtype" in layer.attrs else x.dtype)


op(
    "EyeLike",
    infer,
    compute_reference,
    attrs={"k": 0, "dtype": DTYPE},
    onnx=read,
    samples=[(["i64[3,4]"], {"dtype": F32}), (["f32[4,4]"], {"k": 1})],
)

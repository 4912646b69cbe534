"""Trilu: the upper (or lower) triangle of the last two axes; input 1 (or attribute `k`) shifts the diagonal."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import make_attribute_exporter
from whet.ops._base import INTS, find_given_ints, op, to_ints


def infer(layer):
    k = find_given_ints(layer, "k", 1)
    if k is not None and len(k) != 1:
        raise NetworkError(f"takes one diagonal, not {k}")
    if layer.inputs[0].type.rank < 2:
        raise NetworkError(f"takes matrices, not {layer.inputs[0].type}")
    return layer.inputs[0].type


def compute_reference(layer, x, k=None):
    k = layer.attrs.get("k", k)
    k = 0 if k is None else to_ints(k)[0]
    return np.triu(x, k) if layer.attrs["upper"] else np.tril(x, k)


op(
    "Trilu",
    infer,
    compute_reference,
    attrs={"upper": 1, "k": INTS},
    to_onnx=make_attribute_exporter("k"),
    samples=[
        (["f32[4,5]"], {}),
        (["f32[2,4,5]", np.array(1)], {"upper": 0}),
        (["i64[5,3]", np.array(-1)], {}),
        (["extreme f32[4,4]"], {"upper": 0}),
    ],
)

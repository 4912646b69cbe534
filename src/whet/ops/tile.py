"""Tile: x repeated along each axis by the counts of input 1 (or attribute `repeats`)."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import make_attribute_exporter
from whet.ops._base import INTS, Couple, find_given_dims, fold_dims, op, to_ints


def infer(layer):
    x, repeats = layer.inputs[0], find_given_dims(layer, "repeats", 1)
    if repeats is None or len(repeats) != x.type.rank:
        raise NetworkError(f"needs one repeat count per axis of {x.type}, not {repeats}")
    return x.type.with_shape(d * r for d, r in zip(x.shape, repeats, strict=True))


op(
    "Tile",
    infer,
    lambda layer, x, repeats=None: np.tile(x, to_ints(layer.attrs.get("repeats", repeats))),
    attrs={"repeats": INTS},
    couples=lambda layer: [Couple(layer.needs(0), i, layer.output, i) for i, r in enumerate(find_given_dims(layer, "repeats", 1) or ()) if r == 1],
    zeros=(),
    shape_value=lambda layer: fold_dims(layer, 1),
    to_onnx=make_attribute_exporter("repeats"),
    samples=[
        (["f32[2,3,4]", np.array([1, 2, 1])], {}),
        (["extreme f32[3,5]", np.array([3, 1])], {}),
        (["i64[2]"], {"repeats": (2,)}),
        (["f32[1,4]", np.array([1, 1])], {}),
    ],
)

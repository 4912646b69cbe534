"""CumSum: running sums along the axis of input 1 (or attribute `axis`).

`exclusive` leaves out the element itself, `reverse` runs from the end.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import inputs_of_attributes
from whet.ops._base import INTS, Couple, axis_of, given_ints, numbers, numeric_input, op


def axis(layer):
    at = given_ints(layer, "axis", 1)
    if at is None or len(at) != 1:
        raise NetworkError(f"CumSum '{layer.name}' needs one axis, not {at}")
    return axis_of(at[0], layer.inputs[0].type.rank)


def infer(layer):
    axis(layer)
    return numeric_input(layer)


def reference(layer, x, at=None):
    at = numbers(layer.attrs.get("axis", at))[0]
    x = np.flip(x, at) if layer.attrs["reverse"] else x
    y = np.cumsum(x, axis=at, dtype=x.dtype)
    if layer.attrs["exclusive"]:
        zero = np.zeros_like(np.take(y, [0], axis=at))
        y = np.concatenate([zero, np.take(y, range(y.shape[at] - 1), axis=at)], axis=at)
    return np.flip(y, at) if layer.attrs["reverse"] else y


op(
    "CumSum",
    infer,
    reference,
    attrs={"exclusive": 0, "reverse": 0, "axis": INTS},
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(layer.output.type.rank) if i != axis(layer)],
    to_onnx=inputs_of_attributes("axis"),
    samples=[
        (["f32[3,7]", np.array(1)], {}),
        (["f32[3,7]", np.array(0)], {"exclusive": 1}),
        (["f32[2,3,5]", np.array(-1)], {"reverse": 1, "exclusive": 1}),
        (["i64[5]", np.array(0)], {"reverse": 1}),
        (["extreme f32[3,16]", np.array(0)], {}),
    ],
)

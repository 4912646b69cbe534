"""LRN: x / (bias + alpha / size * sum of squares over `size` adjacent channels)^beta."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import NEEDS_INT, Couple, op
from whet.ops._types import require_float_input


def compute_reference(layer, x):
    a = layer.attrs
    before = min((a["size"] - 1) // 2, x.shape[1])  # channels farther away do not exist
    after = min(a["size"] // 2, x.shape[1])
    squares = np.pad(x * x, [(0, 0), (before, after), *((0, 0),) * (x.ndim - 2)])
    around = sum(squares[:, i : i + x.shape[1]] for i in range(before + after + 1))
    return x / np.power(a["bias"] + (a["alpha"] / a["size"]) * around, x.dtype.type(a["beta"]))


def infer(layer):
    if layer.attrs["size"] < 1:
        raise NetworkError(f"size is {layer.attrs['size']}; it must be at least 1")
    return require_float_input(layer)


op(
    "LRN",
    infer,
    compute_reference,
    attrs={"alpha": 1e-4, "beta": 0.75, "bias": 1.0, "size": NEEDS_INT},
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(layer.output.type.rank) if i != 1],
    samples=[
        (["f32[2,7,4,5]"], {"size": 3}),
        (["f32[1,9,4]"], {"size": 4, "alpha": 0.5, "beta": 0.5, "bias": 2.0}),
        (["f32[1,3,2,2]"], {"size": 5, "alpha": 1.0}),
    ],
)

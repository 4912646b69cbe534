"""BitShift: a shifted by b bits, LEFT or RIGHT; unsigned integers."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import NEEDS_STRING, op
from whet.ops._binary import infer_integers, list_binary_couples


def infer(layer):
    if layer.attrs["direction"] not in ("LEFT", "RIGHT"):
        raise NetworkError(f"direction is LEFT or RIGHT, not {layer.attrs['direction']!r}")
    return infer_integers(layer)


op(
    "BitShift",
    infer,
    lambda layer, a, b: np.left_shift(a, b) if layer.attrs["direction"] == "LEFT" else np.right_shift(a, b),
    attrs={"direction": NEEDS_STRING},
    samples=[(["u8[3,5]", "u8[5]"], {"direction": "LEFT"}), (["extreme u32[7]", "u32[7]"], {"direction": "RIGHT"})],
    couples=list_binary_couples,
    pointwise=True,
)

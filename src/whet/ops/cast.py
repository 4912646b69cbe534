"""Cast: to the element type `to`. Floats are truncated to integers; nonzero values are true.

With `saturate`, values beyond a float8's range become its largest value; without, NaN or infinity.
"""

import ml_dtypes
import numpy as np

from whet.network import BF16, BOOL, F8E4M3, F8E5M2, F16, F32, F64, I32, I64, SMALL_FLOATS
from whet.ops._base import NEEDS_DTYPE, find_known_values, op
from whet.ops._types import list_same_axis_couples


def cast(x: np.ndarray, dtype: np.dtype, saturate: int = 1) -> np.ndarray:
    """x in another NumPy type."""
    if saturate and dtype in _SMALL_FLOATS:
        top = float(ml_dtypes.finfo(dtype).max)
        x = np.clip(x.astype(np.float32), -top, top)
    return x.astype(dtype)


_SMALL_FLOATS = frozenset(t.numpy for t in SMALL_FLOATS)


def read(node, g):
    return node.add(g, "Cast", node.inputs[0], to=node.dtype(node.attrs["to"]), saturate=node.attrs.get("saturate", 1))


def shape_value(layer):
    got = find_known_values(layer.inputs[0])
    to = layer.attrs["to"]
    return [got if to.kind in ("int", "float") and to.bits >= 32 else None]


op(
    "Cast",
    lambda layer: layer.needs(0).type.with_dtype(layer.attrs["to"]),
    lambda layer, x: cast(x, layer.attrs["to"].numpy, layer.attrs["saturate"]),
    attrs={"to": NEEDS_DTYPE, "saturate": 1},
    onnx=read,
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    shape_value=shape_value,
    pointwise=True,
    samples=[
        (["f32[3,5]"], {"to": I64}),
        (["i64[3,5]"], {"to": F32}),
        (["extreme f32[4,16]"], {"to": F16}),
        (["extreme f32[4,16]"], {"to": BF16}),
        (["extreme f32[4,16]"], {"to": BOOL}),
        (["bool[3,5]"], {"to": F32}),
        (["f16[3,5]"], {"to": F64}),
        (["f32[3,5]"], {"to": F32}),
        (["extreme f32[4,16]"], {"to": F8E4M3}),
        (["extreme f32[4,16]"], {"to": F8E5M2, "saturate": 0}),
        (["i64[2]"], {"to": I32}),
    ],
)

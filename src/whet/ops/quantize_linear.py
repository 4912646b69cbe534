"""QuantizeLinear: y = saturate(round(x / scale) + zero point), in the zero point's type (or `get_output_dtype`).

One scale, one per entry of `axis`, or with `block_size` one per block along it.
"""

import ml_dtypes
import numpy as np

from whet.errors import NetworkError
from whet.network import F8E4M3, SMALL_FLOATS, U8
from whet.ops._base import DTYPE, op
from whet.ops._quantized import check_scale, reshape_to_broadcast, scale_couples
from whet.ops._types import require_float_input

LARGEST = {t: float(ml_dtypes.finfo(t.numpy).max) for t in SMALL_FLOATS}


def get_output_dtype(layer):
    zero = layer.input(2)
    return zero.dtype if zero is not None else layer.attrs.get("output_dtype", U8)


def infer(layer):
    t, dtype = require_float_input(layer), get_output_dtype(layer)
    if dtype.kind not in ("int", "uint") and dtype not in LARGEST:
        raise NetworkError(f"QuantizeLinear '{layer.name}' produces integers or small floats, not {dtype}")
    check_scale(layer)
    return t.with_dtype(dtype)


def compute_reference(layer, x, scale, zero=None):
    axis, block, dtype = layer.attrs["axis"], layer.attrs["block_size"], get_output_dtype(layer)
    y = x / reshape_to_broadcast(scale, x.shape, axis, block).astype(x.dtype)
    if dtype in LARGEST:
        top = LARGEST[dtype]
        return (np.clip(y, -top, top) if layer.attrs["saturate"] else y).astype(dtype.numpy)
    y = np.rint(y)
    if zero is not None:
        y = y + reshape_to_broadcast(zero, x.shape, axis, block).astype(x.dtype)
    top = 2 ** (dtype.bits - (dtype.kind == "int")) - 1
    low = -top - 1 if dtype.kind == "int" else 0
    y = np.clip(y, low, top)
    if np.isnan(y).any():
        y = np.where(np.isnan(y), 0, y)
    return y.astype(np.int64 if dtype.bits > 16 else np.int32).astype(dtype.numpy)  # the largest i32 and f32 are no values of each other's type


def read(node, g):
    dtype = node.attrs.get("output_dtype")
    attrs = {k: v for k, v in node.attrs.items() if k not in ("output_dtype", "precision")}
    return node.add(g, "QuantizeLinear", *node.inputs, **attrs, output_dtype=node.dtype(dtype) if dtype else None)


op(
    "QuantizeLinear",
    infer,
    compute_reference,
    attrs={"axis": 1, "saturate": 1, "block_size": 0, "output_dtype": DTYPE},
    couples=lambda layer: scale_couples(layer),
    onnx=read,
    onnx_ops=("QuantizeLinear", "com.microsoft.QuantizeLinear"),
    samples=[
        (["f32[2,3,5]", np.array(0.02, np.float32), np.array(0, np.int8)], {}),
        (["f32[2,3,5]", np.array([0.02, 0.1, 0.5], np.float32), np.array([0, 5, 250], np.uint8)], {}),
        (["f32[4,7]", np.array([0.1, 0.2, 0.01, 1], np.float32), np.array([0, 0, 0, 0], np.int8)], {"axis": 0}),
        (["f32[3,6]", "const positive f32[3,2]"], {"axis": 1, "block_size": 3}),
        (["f32[3,6]", np.array(0.5, np.float32)], {}),
        (["f32[3,6]", np.array(0.01, np.float32)], {"output_dtype": F8E4M3}),
    ],
)

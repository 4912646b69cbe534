"""DequantizeLinear: y = (x - zero point) * scale, in the scale's type. Scales as in QuantizeLinear."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._quantized import check_scale, reshape_to_broadcast, scale_couples


def infer(layer):
    x, scale, zero = layer.inputs[0], layer.inputs[1], layer.input(2)
    if not scale.dtype.is_float or (zero is not None and zero.dtype != x.dtype):
        raise NetworkError(f"DequantizeLinear '{layer.name}': scale {scale.type} or zero point {zero and zero.type} do not match {x.type}")
    check_scale(layer)
    return x.type.with_dtype(scale.dtype)


def compute_reference(layer, x, scale, zero=None):
    axis, block = layer.attrs["axis"], layer.attrs["block_size"]
    wide = np.float32 if x.dtype.kind == "V" or x.dtype.kind == "f" else np.int64
    y = x.astype(wide)
    if zero is not None:
        y = y - reshape_to_broadcast(zero, x.shape, axis, block).astype(wide)
    return y.astype(scale.dtype) * reshape_to_broadcast(scale, x.shape, axis, block)


def read(node, g):
    return node.add(g, "DequantizeLinear", *node.inputs, **{k: v for k, v in node.attrs.items() if k != "output_dtype"})


op(
    "DequantizeLinear",
    infer,
    compute_reference,
    attrs={"axis": 1, "block_size": 0},
    couples=scale_couples,
    onnx=read,
    onnx_ops=("DequantizeLinear", "com.microsoft.DequantizeLinear"),
    samples=[
        (["i8[2,3,5]", np.array(0.02, np.float32), np.array(0, np.int8)], {}),
        (["extreme u8[2,3,5]", np.array([0.02, 0.1, 0.5], np.float32), np.array([0, 5, 250], np.uint8)], {}),
        (["extreme i8[4,7]", np.array([0.1, 0.2, 0.01, 1], np.float32)], {"axis": 0}),
        (["i32[3]", np.array(0.5, np.float32)], {}),
        (["i8[3,6]", "const positive f32[3,2]"], {"axis": 1, "block_size": 3}),
        (["f8e4m3[3,6]", np.array(0.5, np.float32)], {}),
    ],
)

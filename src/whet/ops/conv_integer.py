"""ConvInteger: Conv of (x - its zero point) with (w - its zero point), 8-bit integers, in i32. Padding counts as the zero point."""

import numpy as np

from whet.errors import NetworkError
from whet.network import F64, I32, Layer, Tensor, TensorType
from whet.ops._base import INTS, op
from whet.ops._integer import check_operands, check_zero, subtract_zero_point
from whet.ops._window import resolve_auto_pad
from whet.ops.conv import compute_reference as run_conv
from whet.ops.conv import infer as infer_conv


def infer(layer):
    x, w = check_operands(layer)
    check_zero(layer, 2, 1)
    check_zero(layer, 3, w.shape[0])
    if w.type.rank < 3:
        raise NetworkError(f"takes filters [K, C, *kernel], not {w.type}")
    floats = [Tensor(t.name, t.type.with_dtype(F64)) for t in (x, w)]
    return TensorType(I32, infer_conv(Layer(layer.op, layer.name, floats, layer.attrs)).shape)


def compute_reference(layer, x, w, x_zero=None, w_zero=None):
    w = subtract_zero_point(w, w_zero, (-1, *(1,) * (w.ndim - 1)))
    return run_conv(layer, subtract_zero_point(x, x_zero, ()), w).astype(np.int64).astype(np.int32)


op(
    "ConvInteger",
    infer,
    compute_reference,
    attrs={"group": 1, "strides": INTS, "dilations": INTS, "pads": INTS, "kernel_shape": INTS},
    onnx=lambda node, g: node.add(g, "ConvInteger", *node.inputs, **resolve_auto_pad(node, node.inputs[0].shape[2:], node.inputs[1].shape[2:])),
    samples=[
        (["extreme u8[1,3,6,6]", "const i8[4,3,3,3]", np.array(128, np.uint8)], {"pads": (1, 1, 1, 1)}),
        (["u8[2,4,5,5]", "const u8[6,2,2,2]", None, np.array([1], np.uint8)], {"group": 2, "strides": (2, 2)}),
    ],
)

"""BitCast: the bits of x as values of another element type of the same width (opset 26)."""

import numpy as np

from whet.errors import UnsupportedError
from whet.network import BOOL, F32, I8, I32, U8
from whet.ops._axes import needs_opset
from whet.ops._base import NEEDS_DTYPE, op
from whet.ops._types import list_same_axis_couples


def infer(layer):
    x, to = layer.needs(0), layer.attrs["to"]
    small = any(t.bits < 8 and t != BOOL for t in (x.dtype, to))
    if small or x.dtype.numpy.itemsize != to.numpy.itemsize:
        raise UnsupportedError(f"BitCast '{layer.name}': {x.dtype} and {to} need the same width, of at least 8 bits")
    return x.type.with_dtype(to)


def compute_reference(layer, x):
    """x may come in a wider type than the layer's own (16-bit floats compute in f32)."""
    return np.ascontiguousarray(x.astype(layer.needs(0).dtype.numpy)).view(layer.attrs["to"].numpy).reshape(x.shape)


def to_onnx(layer, w):
    needs_opset(layer, w, 26, "BitCast")
    w.node("BitCast", [w.name(layer.inputs[0])], [w.name(layer.output)], name=layer.name, to=layer.attrs["to"])


op(
    "BitCast",
    infer,
    compute_reference,
    attrs={"to": NEEDS_DTYPE},
    onnx=lambda node, g: node.add(g, "BitCast", node.inputs[0], to=node.dtype(node.attrs["to"])),
    to_onnx=to_onnx,
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    samples=[(["f32[3,5]"], {"to": I32}), (["i32[3,5]"], {"to": F32}), (["full i8[3,5]"], {"to": U8}), (["full u8[3,5]"], {"to": I8})],
)

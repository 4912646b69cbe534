"""MaxUnpool: puts the values x at the flat `indices` (of MaxPool) into zeros of the unpooled shape; input 2 gives a larger output shape."""

from math import prod

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import INTS, find_given_dims, op, to_ints
from whet.ops._types import may_equal, require_numeric_input


def infer_sizes(layer, sizes):
    r, a = len(sizes) - 2, layer.attrs
    kernel, strides, pads = a["kernel_shape"], a.get("strides") or (1,) * r, a.get("pads") or (0,) * 2 * r
    return (*sizes[:2], *((sizes[2 + i] - 1) * strides[i] - pads[i] - pads[r + i] + kernel[i] for i in range(r)))


def infer(layer):
    t = require_numeric_input(layer) or layer.inputs[0].type
    indices = layer.needs(1)
    if not may_equal(indices.shape, t.shape) or indices.dtype.kind != "int" or len(layer.attrs.get("kernel_shape") or ()) != t.rank - 2:
        raise NetworkError(f"takes indices of the shape of {t} and a kernel_shape of its spatial rank, not {indices.type}")
    shape = find_given_dims(layer, "output_shape", 2)
    return t.with_shape(infer_sizes(layer, t.shape) if shape is None else shape)


def compute_reference(layer, x, indices, shape=None):
    sizes = infer_sizes(layer, x.shape)
    y = np.zeros(prod(sizes), x.dtype)
    y[indices.reshape(-1)] = x.reshape(-1)
    y = y.reshape(sizes)
    if shape is None:
        return y
    larger = np.zeros(to_ints(shape), x.dtype)
    larger[tuple(map(slice, sizes))] = y
    return larger


op(
    "MaxUnpool",
    infer,
    compute_reference,
    attrs={"kernel_shape": INTS, "strides": INTS, "pads": INTS},
    samples=[
        (["f32[1,1,2,2]", np.array([[[[5, 7], [13, 15]]]])], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["f32[1,1,2,2]", np.array([[[[5, 7], [13, 15]]]]), np.array([1, 1, 5, 5])], {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ],
)

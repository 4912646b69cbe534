"""MatMulInteger: (A - a's zero point) (B - b's zero point) of 8-bit integers, in i32."""

import numpy as np

from whet.errors import NetworkError
from whet.network import I32, TensorType
from whet.ops._base import op
from whet.ops._integer import check_operands, check_zero, subtract_zero_point
from whet.ops._ort import make_adder
from whet.ops._types import broadcast, unify


def infer(layer):
    a, b = check_operands(layer)
    if a.type.rank < 2 or b.type.rank < 2:
        raise NetworkError(f"takes matrices, not {a.type} and {b.type}")
    check_zero(layer, 2, a.shape[-2])
    check_zero(layer, 3, b.shape[-1])
    unify(a.shape[-1], b.shape[-2], f"{a.type} and {b.type} have mismatched inner dimensions")
    return TensorType(I32, (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))


def compute_reference(layer, a, b, a_zero=None, b_zero=None):
    return np.matmul(subtract_zero_point(a, a_zero, (-1, 1)), subtract_zero_point(b, b_zero, (1, -1))).astype(np.int64).astype(np.int32)


def read(node, g):
    """A vector is a matrix of one row or column, which is dropped from the result, as in numpy.matmul."""
    a, b, *zeros = node.inputs
    dropped = [axis for axis, t in ((-2, a), (-1, b)) if t.type.rank == 1]
    if not dropped:
        return node.add(g, "MatMulInteger", *node.inputs)
    add = make_adder(node, g)
    matrices = [add("Unsqueeze", t, axes=(axis,)) if t.type.rank == 1 else t for t, axis in ((a, 0), (b, 1))]
    return node.add(g, "Squeeze", add("MatMulInteger", *matrices, *zeros), axes=tuple(dropped))


op(
    "MatMulInteger",
    infer,
    compute_reference,
    onnx=read,
    samples=[
        (["extreme u8[3,17]", "extreme i8[17,5]", np.array(128, np.uint8)], {}),
        (["i8[2,3,8]", "i8[8,4]", None, np.array([1, -2, 3, 0], np.int8)], {}),
        (["u8[4,6]", "u8[6,4]"], {}),
        (["extreme u8[2,7,33]", "const extreme i8[33,45]", "u8[]"], {}),
        (["extreme i8[5,64]", "const extreme u8[64,32]", np.array(-3, np.int8), np.arange(32, dtype=np.uint8) * 8], {}),
        (["extreme u8[1,30]", "const extreme i8[30,9]"], {}),
    ],
)

"""Erfc: TensorFlow's complementary error function, which tf2onnx leaves under its name (exact GELU of Keras 3). Read as 1 - Erf."""

from whet.ops._ort import add_scalar, make_adder
from whet.ops._refused import read_as_others


def read(node, g):
    (x,) = node.inputs
    return node.add(g, "Sub", add_scalar(node, g, 1.0, x, "one"), make_adder(node, g)("Erf", x))


read_as_others("Erfc", read, "Sub and Erf")

"""QLinearWhere (ONNX Runtime): elements of one 8-bit tensor or another. Read as Where between Q and DQ."""

from whet.ops._qlinear import dequantized, in_floats, quantized, register


def read(node, g):
    y = in_floats(node, g, "Where", [node.inputs[0], dequantized(node, g, 1, "x"), dequantized(node, g, 4, "y")])
    return quantized(node, g, y, 7, like=1)


register("QLinearWhere", read, "Where")

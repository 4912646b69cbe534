"""QLinearWhere (ONNX Runtime): elements of one 8-bit tensor or another. Read as Where between Q and DQ."""

from whet.ops._qlinear import compute_in_floats, dequantize_inputs, quantize_output, register


def read(node, g):
    y = compute_in_floats(node, g, "Where", [node.inputs[0], dequantize_inputs(node, g, 1, "x"), dequantize_inputs(node, g, 4, "y")])
    return quantize_output(node, g, y, 7, like=1)


register("QLinearWhere", read, "Where")

"""QLinearSoftmax (ONNX Runtime): Softmax of 8-bit integers, as defined by its attribute `opset`. Read as Softmax between Q and DQ."""

from whet.ops._qlinear import compute_in_floats, dequantize_inputs, quantize_output, register


def read(node, g):
    attrs = {k: v for k, v in node.attrs.items() if k == "axis"}
    y = compute_in_floats(node, g, "Softmax", [dequantize_inputs(node, g, 0, "x")], attrs, opset=node.attrs.get("opset", 13))
    return quantize_output(node, g, y, 3)


register("QLinearSoftmax", read, "Softmax")

"""QLinearConcat (ONNX Runtime): concatenation of 8-bit tensors of different scales. Read as Concat between Q and DQ."""

from whet.ops._qlinear import compute_in_floats, dequantize_inputs, quantize_output, register


def read(node, g):
    """Inputs: y scale, y zero point, then (x, scale, zero point) of each part."""
    if len(node.inputs) < 5 or len(node.inputs) % 3 != 2:
        raise node.unsupported(f"it has {len(node.inputs)} inputs, not two plus three per part. Quantize the model again")
    parts = [dequantize_inputs(node, g, i, f"x{i // 3}") for i in range(2, len(node.inputs), 3)]
    return quantize_output(node, g, compute_in_floats(node, g, "Concat", parts), 0, like=2)


register("QLinearConcat", read, "Concat")

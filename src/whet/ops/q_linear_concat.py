"""QLinearConcat (ONNX Runtime): concatenation of 8-bit tensors of different scales. Read as Concat between Q and DQ."""

from whet.ops._qlinear import dequantized, in_floats, quantized, register


def read(node, g):
    """Inputs: y scale, y zero point, then (x, scale, zero point) of each part."""
    if len(node.inputs) < 5 or len(node.inputs) % 3 != 2:
        raise node.unsupported(f"it has {len(node.inputs)} inputs, not two plus three per part. Quantize the model again")
    parts = [dequantized(node, g, i, f"x{i // 3}") for i in range(2, len(node.inputs), 3)]
    return quantized(node, g, in_floats(node, g, "Concat", parts), 0, like=2)


register("QLinearConcat", read, "Concat")

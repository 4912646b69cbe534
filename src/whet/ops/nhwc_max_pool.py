"""NhwcMaxPool (ONNX Runtime): MaxPool of 8-bit images with the channels at the end. Read as MaxPool between Transposes."""

from whet.ops._ort import register_fused
from whet.ops._qlinear import compute_in_floats, read_channels_last


def read(node, g):
    return compute_in_floats(node, g, "MaxPool", node.inputs)


def read_last(node, g):
    node.attrs["channels_last"] = 1
    return read_channels_last(read)(node, g)


register_fused("NhwcMaxPool", read_last, "MaxPool and Transpose")

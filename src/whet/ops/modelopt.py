"""NVIDIA ModelOpt's quantizers of the domain trt (TRT_FP8QuantizeLinear, TRT_INT4DequantizeLinear, ...): read as ONNX's, which have the types."""

from __future__ import annotations

from whet.network import F8E4M3, I4
from whet.ops._refused import read_as_others

_DOMAIN = "trt."


def _make_quantize(dtype):
    def read(node, g):
        return node.add(g, "QuantizeLinear", *node.inputs, output_dtype=dtype, **node.attrs)

    return read


def read_dequantize(node, g):
    """Inputs: integers or float8, scale, and a zero point, which is 0. INT4 in bytes, one value each, is dequantized likewise."""
    return node.add(g, "DequantizeLinear", *node.inputs, **node.attrs)


for _name, _dtype in (("FP8", F8E4M3), ("INT4", I4)):
    for _op, _read in (("QuantizeLinear", _make_quantize(_dtype)), ("DequantizeLinear", read_dequantize)):
        read_as_others(f"{_DOMAIN}TRT_{_name}{_op}", _read, _op, (f"{_DOMAIN}TRT_{_name}{_op}",))

"""ONNX Runtime's QLinear ops (domain com.microsoft): read as the floating-point op between DequantizeLinear and QuantizeLinear.

Their definitions: docs/ContribOperators.md of microsoft/onnxruntime. `quantize_static(quant_format=QuantFormat.QOperator)` writes them.
Passes then create integer layers, as for any model with Q/DQ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whet.ops._base import get_op
from whet.ops._refused import read_as_others

DOMAIN = "com.microsoft."


def dequantize_inputs(node, g, i: int, subject: str, **more: Any):
    """Inputs i, i + 1, i + 2 (integers, scale, optional zero point) dequantized."""
    x, scale, zero = node.inputs[i], node.inputs[i + 1], node.input(i + 2)
    return g.add("DequantizeLinear", x, scale, *(() if zero is None else (zero,)), name=f"{node.name}_{subject}", sources=(node.name,), **more)


def quantize_output(node, g, y, i: int, like: int = 0):
    """The node's output: `y` quantized by the scale and zero point of inputs i, i + 1; without zero point in the type of input `like`."""
    zero = node.input(i + 1)
    if zero is not None:
        return node.add(g, "QuantizeLinear", y, node.inputs[i], zero)
    return node.add(g, "QuantizeLinear", y, node.inputs[i], output_dtype=node.inputs[like].dtype)


def compute_in_floats(node, g, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any] | None = None, opset: int = 13):
    """The result of ONNX's `op` of `opset` on `inputs`. `attrs`: default the node's."""
    given = dict(node.attrs if attrs is None else attrs)
    view = replace(node, op=op, domain="", opset=opset, name=f"{node.name}_{op.lower()}", inputs=list(inputs), attrs=given)
    view.outputs = [g.fresh(f"{node.name}_float")]
    reader = get_op(op).onnx
    return view.add(g, op, *inputs, **given) if reader is None else reader(view, g)


def read_channels_last(read: Callable[..., Any]) -> Callable[..., Any]:
    """The reader `read` of an op on images [N, C, ...] (input 0), for the nodes with channels_last=1 of ONNX Runtime's optimizer, too.

    Their images and results have the channels at the end; the weights are unchanged. Transposes are added before and after.
    """

    def read_any(node, g):
        if not node.attrs.pop("channels_last", 0):
            return read(node, g)
        images, rank = node.inputs[0], len(node.inputs[0].shape)
        first = g.add("Transpose", images, perm=(0, rank - 1, *range(1, rank - 1)), name=f"{node.name}_nchw", sources=(node.name,))
        y = read(replace(node, inputs=[first, *node.inputs[1:]], outputs=[g.fresh(f"{node.name}_nchw_y")]), g)
        return node.add(g, "Transpose", y, perm=(0, *range(2, rank), 1))

    return read_any


def register_q_linear(name: str, op: str, operands: int = 1, opset: int = 13, attrs: Mapping[str, Any] | None = None):
    """Registers the reader of an op with inputs (x, scale, zero point) * operands, y scale, y zero point. `attrs`: defaults that differ from ONNX."""

    def read(node, g):
        floats = [dequantize_inputs(node, g, 3 * i, f"x{i}") for i in range(operands)]
        y = compute_in_floats(node, g, op, floats, {**(attrs or {}), **node.attrs}, opset)
        return quantize_output(node, g, y, 3 * operands)

    return register(name, read_channels_last(read), op)


def register(name: str, read, op: str):
    """Registers the reader of an op of ONNX Runtime's domain."""
    return read_as_others(name, read, f"DequantizeLinear, {op} and QuantizeLinear", (DOMAIN + name,))

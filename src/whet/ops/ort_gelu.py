"""Gelu, BiasGelu, FastGelu and QuickGelu (ONNX Runtime): activations with the bias that precedes them."""

from whet.ops._ort import adder, fused, scalar


def _biased(node, g):
    x, bias = node.inputs[0], node.input(1)
    return x if bias is None else adder(node, g)("Add", x, bias)


def read_quick_gelu(node, g):
    """x * sigmoid(alpha * x)"""
    add, x = adder(node, g), node.inputs[0]
    return node.add(g, "Mul", x, add("Sigmoid", add("Mul", x, scalar(node, g, node.attrs.get("alpha", 1.702), x, "alpha"))))


fused("Gelu", lambda node, g: node.add(g, "Gelu", node.inputs[0]), "Gelu")
fused("BiasGelu", lambda node, g: node.add(g, "Gelu", _biased(node, g)), "Add and Gelu")
fused("FastGelu", lambda node, g: node.add(g, "Gelu", _biased(node, g), approximate="tanh"), "Add and Gelu")
fused("QuickGelu", read_quick_gelu, "Mul and Sigmoid")

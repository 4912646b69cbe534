"""Gelu, BiasGelu, FastGelu and QuickGelu (ONNX Runtime): activations with the bias that precedes them."""

from whet.ops._ort import add_scalar, make_adder, register_fused


def _add_bias(node, g):
    x, bias = node.inputs[0], node.input(1)
    return x if bias is None else make_adder(node, g)("Add", x, bias)


def read_quick_gelu(node, g):
    """x * sigmoid(alpha * x)"""
    add, x = make_adder(node, g), node.inputs[0]
    return node.add(g, "Mul", x, add("Sigmoid", add("Mul", x, add_scalar(node, g, node.attrs.get("alpha", 1.702), x, "alpha"))))


register_fused("Gelu", lambda node, g: node.add(g, "Gelu", node.inputs[0]), "Gelu")
register_fused("BiasGelu", lambda node, g: node.add(g, "Gelu", _add_bias(node, g)), "Add and Gelu")
register_fused("FastGelu", lambda node, g: node.add(g, "Gelu", _add_bias(node, g), approximate="tanh"), "Add and Gelu")
register_fused("QuickGelu", read_quick_gelu, "Mul and Sigmoid")

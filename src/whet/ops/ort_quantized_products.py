"""MatMulIntegerToFloat, DynamicQuantizeMatMul and MatMulNBits (ONNX Runtime): products with 8-bit or 4-bit weights and float results."""

import numpy as np

from whet.network import U8
from whet.ops._ort import add_integer_product, add_scalar, make_adder, register_fused, unpack_bits


def read_integer_to_float(node, g):
    """Inputs: A, B, their scales, their zero points, bias."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = (node.input(i) for i in range(7))
    return _add_product(node, g, a, b, a_scale, b_scale, a_zero, b_zero, bias)


def read_dynamic(node, g):
    """Inputs: A (float), B, its scale, its zero point, bias. A is quantized to the range that it has, with zero, as by DynamicQuantizeLinear."""
    add = make_adder(node, g)
    x, b, b_scale, b_zero, bias = (node.input(i) for i in range(5))
    zero, top = add_scalar(node, g, 0.0, x, "zero"), add_scalar(node, g, 255.0, x, "top")
    low = add("Min", add("ReduceMin", x, keepdims=0), zero)
    high = add("Max", add("ReduceMax", x, keepdims=0), zero)
    scale = add("Div", add("Sub", high, low), top)
    least = add("Max", scale, add_scalar(node, g, float(np.finfo(np.float32).tiny), x, "least"))  # x of zeros alone: no division by zero
    point = add("Cast", add("Clip", add("Round", add("Div", add("Sub", zero, low), least)), zero, top), to=U8)
    return _add_product(node, g, add("QuantizeLinear", x, least, point), b, scale, b_scale, point, b_zero, bias)


def _add_product(node, g, a, b, a_scale, b_scale, a_zero, b_zero, bias):
    y = add_integer_product(make_adder(node, g), a, b, a_scale, b_scale, a_zero, b_zero)
    return node.add(g, "Identity", y) if bias is None else node.add(g, "Add", y, bias)


def read_n_bits(node, g):
    """Inputs: A, B (constant) [N, blocks, bytes], scales [N, blocks], zero points, block of each row, bias. The weights are dequantized here."""
    a, b, scales, zeros, order, bias = (node.input(i) for i in range(6))
    n, k, bits, block = (node.attrs[key] if key in node.attrs else default for key, default in (("N", 0), ("K", 0), ("bits", 4), ("block_size", 32)))
    if not all(t is None or t.is_constant for t in (b, scales, zeros, order)):
        raise node.unsupported("its weights are computed; whet reads constant ones. Save the model with weights as initializers")
    if bits not in (2, 4, 8):
        raise node.unsupported(f"its weights have {bits} bits; 2, 4 and 8 are read")
    blocks = -(-k // block)
    values = unpack_bits(b.array(), bits).reshape(n, -1)[:, : blocks * block].astype(np.float32)
    points = float(1 << (bits - 1))
    if zeros is not None:
        raw = zeros.array()
        points = (unpack_bits(raw.reshape(n, -1), bits)[:, :blocks] if raw.dtype == np.uint8 else raw.reshape(n, blocks)).astype(np.float32)
    factors = scales.array().reshape(n, blocks).astype(np.float32)
    if order is None:
        places = np.arange(k) // block
    else:
        places = order.array().astype(np.int64)[:k]
    spread = points[:, places] if isinstance(points, np.ndarray) else points
    weight = (values[:, :k] - spread) * factors[:, places]
    w = g.constant(np.ascontiguousarray(weight.T).astype(a.dtype.numpy), f"{node.name}.weight")
    if bias is None:
        return node.add(g, "MatMul", a, w)
    return node.add(g, "Add", make_adder(node, g)("MatMul", a, w), bias)


register_fused("MatMulIntegerToFloat", read_integer_to_float, "MatMulInteger, Cast and Mul")
register_fused("DynamicQuantizeMatMul", read_dynamic, "QuantizeLinear, MatMulInteger, Cast and Mul")
register_fused("MatMulNBits", read_n_bits, "MatMul with dequantized weights")

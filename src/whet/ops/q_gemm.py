"""QGemm (ONNX Runtime): Gemm of 8-bit matrices with an i32 bias. Read as Gemm between DequantizeLinear and (with a y scale) QuantizeLinear."""

import numpy as np

from whet.ops._qlinear import dequantize_inputs, quantize_output, register


def read(node, g):
    """Inputs: a, b with scale and zero point each, c (i32, of the scale alpha * a scale * b scale), y scale, y zero point."""
    alpha, flip = float(node.attrs.get("alpha", 1.0)), {k: node.attrs.get(k, 0) for k in ("transA", "transB")}
    a_scale, b_scale, c = node.inputs[1], node.inputs[4], node.input(6)
    a = dequantize_inputs(node, g, 0, "a")
    b = dequantize_inputs(node, g, 3, "b", axis=0 if flip["transB"] else 1)
    if c is not None:
        if not (a_scale.is_constant and b_scale.is_constant):
            raise node.unsupported("it has a bias and computed scales; the scales must be constant")
        scale = np.float32(alpha) * a_scale.array().reshape(-1) * b_scale.array().reshape(-1)
        scale = g.constant(scale.reshape(()) if scale.size == 1 else scale, f"{node.name}.bias_scale")
        c = g.add("DequantizeLinear", c, scale, axis=-1, name=f"{node.name}_c", sources=(node.name,))
    if node.input(7) is None:
        return node.add(g, "Gemm", a, b, c, alpha=alpha, **flip)
    y = g.add("Gemm", *(t for t in (a, b, c) if t is not None), name=f"{node.name}_gemm", sources=(node.name,), alpha=alpha, **flip)
    return quantize_output(node, g, y, 7)


register("QGemm", read, "Gemm")

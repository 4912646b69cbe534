"""QLinearMul (ONNX Runtime): the elementwise product of two 8-bit tensors. Read as Mul between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearMul", "Mul", operands=2)

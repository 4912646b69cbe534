"""QLinearMul (ONNX Runtime): the elementwise product of two 8-bit tensors. Read as Mul between Q and DQ."""

from whet.ops._qlinear import q_linear

q_linear("QLinearMul", "Mul", operands=2)

"""QLinearMul (ONNX Runtime): the product, element by element, of two 8-bit tensors. Read as Mul between Q and DQ."""

from whet.ops._qlinear import q_linear

q_linear("QLinearMul", "Mul", operands=2)

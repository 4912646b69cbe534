"""QLinearAdd (ONNX Runtime): the sum of two 8-bit tensors of different scales. Read as Add between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearAdd", "Add", operands=2)

"""QLinearSigmoid (ONNX Runtime): Sigmoid of 8-bit integers. Read as Sigmoid between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearSigmoid", "Sigmoid")

"""QLinearLeakyRelu (ONNX Runtime): LeakyRelu of 8-bit integers. Read as LeakyRelu between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearLeakyRelu", "LeakyRelu")

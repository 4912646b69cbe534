"""QLinearLeakyRelu (ONNX Runtime): LeakyRelu of 8-bit integers. Read as LeakyRelu between Q and DQ."""

from whet.ops._qlinear import q_linear

q_linear("QLinearLeakyRelu", "LeakyRelu")

"""QLinearAveragePool (ONNX Runtime): AveragePool of 8-bit integers, new scale. Read as AveragePool between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearAveragePool", "AveragePool")

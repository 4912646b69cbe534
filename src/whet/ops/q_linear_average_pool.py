"""QLinearAveragePool (ONNX Runtime): AveragePool of 8-bit integers, new scale. Read as AveragePool between Q and DQ."""

from whet.ops._qlinear import q_linear

q_linear("QLinearAveragePool", "AveragePool")

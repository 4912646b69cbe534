"""QLinearGlobalAveragePool (ONNX Runtime): means of 8-bit images, new scale. Read as GlobalAveragePool between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearGlobalAveragePool", "GlobalAveragePool")

"""QLinearReduceMean (ONNX Runtime): means of 8-bit integers over axes. Read as ReduceMean of opset 11 between Q and DQ."""

from whet.ops._qlinear import register_q_linear

register_q_linear("QLinearReduceMean", "ReduceMean", opset=11)

"""QLinearReduceMean (ONNX Runtime): means of 8-bit integers over axes. Read as ReduceMean of opset 11 between Q and DQ."""

from whet.ops._qlinear import q_linear

q_linear("QLinearReduceMean", "ReduceMean", opset=11)

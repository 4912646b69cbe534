"""DynamicQuantizeLSTM (ONNX Runtime): an LSTM with 8-bit weights, as `quantize_dynamic` writes it.

Read as LSTM with dequantized weights. ONNX Runtime also rounds x and h to 8 bits at every step; whet does not, so its results are those of
the quantized weights without that error.
"""

from dataclasses import replace

import numpy as np

from whet.ops._base import get_op
from whet.ops._ort import register_fused


def read(node, g):
    """Inputs: X, W [directions, input, 4 hidden], R, B, lengths, h, c, P, then scale and zero point of W and of R: [directions] or per column."""
    inputs = list(node.inputs[:8])
    for i, scale, zero in ((1, 8, 9), (2, 10, 11)):
        parts = [node.input(k) for k in (i, scale, zero)]
        if not all(t is not None and t.is_constant for t in parts):
            raise node.unsupported("its weights, scales or zero points are computed; whet reads constant ones. Save the model with initializers")
        values, factors, points = (t.array().astype(np.float32) for t in parts)
        rows = (len(values), 1, -1)
        dense = (values - points.reshape(rows)) * factors.reshape(rows)
        inputs[i] = g.constant(np.ascontiguousarray(dense.transpose(0, 2, 1)), f"{node.name}.{'WR'[i - 1]}")
    lstm = replace(node, op="LSTM", domain="", opset=14, inputs=inputs)
    reader = get_op("LSTM").onnx
    return lstm.add(g, "LSTM", *inputs, **node.attrs) if reader is None else reader(lstm, g)


register_fused("DynamicQuantizeLSTM", read, "LSTM with dequantized weights")

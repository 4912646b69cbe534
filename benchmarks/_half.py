"""An ONNX model in FP16 throughout, as torch's model.half() is: inputs, weights, constants and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np


def half(model: Any) -> Any:
    """Turns every FP32 tensor of an ONNX model into FP16, in place; Resize keeps its scales, Cast to FP32 becomes one to FP16."""
    from onnx import TensorProto, numpy_helper

    graph = model.graph
    scales = {n.input[2] for n in graph.node if n.op_type == "Resize" and len(n.input) > 2}

    def narrowed(t: Any) -> Any:
        with np.errstate(over="ignore"):
            a = numpy_helper.to_array(t).astype(np.float16)
        finite = np.nan_to_num(a, posinf=65504, neginf=-65504) if not np.isfinite(a).all() else a  # masks of -3e38 become the lowest FP16 value
        return numpy_helper.from_array(finite, t.name)

    for i, t in enumerate(graph.initializer):
        if t.data_type == TensorProto.FLOAT and t.name not in scales:
            graph.initializer[i].CopyFrom(narrowed(t))
    for node in graph.node:
        for a in node.attribute:
            if a.name == "value" and a.t.data_type == TensorProto.FLOAT and node.output[0] not in scales:
                a.t.CopyFrom(narrowed(a.t))
            if node.op_type == "Cast" and a.name == "to" and a.i == TensorProto.FLOAT:
                a.i = TensorProto.FLOAT16
    for v in (*graph.input, *graph.output):
        if v.type.tensor_type.elem_type == TensorProto.FLOAT:
            v.type.tensor_type.elem_type = TensorProto.FLOAT16
    del graph.value_info[:]
    return model

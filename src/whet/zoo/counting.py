"""Counts a model's parameters and multiply-accumulates from its inferred shapes."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class Count:
    """The result of count()."""

    parameters: int
    macs: int


def count(model: "onnx.ModelProto", trainable: set[str]) -> Count:
    """Parameters named in `trainable`, and multiply-accumulates of Conv, Gemm and MatMul. All shapes must be static."""
    from onnx import shape_inference

    graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim)
              for v in (*graph.input, *graph.value_info, *graph.output)}
    shapes |= {w.name: tuple(w.dims) for w in graph.initializer}
    macs = 0
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            continue
        out, first, second = (shapes.get(v, ()) for v in (node.output[0], node.input[0], node.input[1]))
        if not out or 0 in out or 0 in first or 0 in second:
            raise ValueError(f"cannot count {node.name or node.op_type}: its shapes {first}, {second} -> {out} are not static")
        if node.op_type == "Conv":
            macs += prod(out) * prod(second[1:])
        elif node.op_type == "Gemm":
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            macs += prod(out) * first[0 if transposed else 1]
        else:
            macs += prod(out) * first[-1]
    return Count(parameters=sum(prod(shapes[w]) for w in trainable), macs=macs)

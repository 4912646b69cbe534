"""Converts a model of an older opset. Runs as a program of its own (stdin to stdout), since the converter may abort on damaged models."""

import sys

from onnx import ModelProto, shape_inference, version_converter

OPSET = 9


def convert(model: ModelProto) -> ModelProto:
    """The model at opset 9. Raises what onnx's version converter raises for a model that it cannot convert."""
    old = ModelProto()
    old.CopyFrom(model)
    if any(o.domain in ("", "ai.onnx") and o.version < 7 for o in old.opset_import):
        _spread_slopes(old)
    return version_converter.convert_version(old, OPSET)


def _spread_slopes(model: ModelProto) -> None:
    """A PRelu's slopes belonged to the channels before opset 7, and broadcast from the last axis since: [C] becomes [C, 1, ...]."""
    graph = model.graph
    read = {n.input[1]: n.input[0] for n in graph.node if n.op_type == "PRelu" and len(n.input) == 2}
    if not read:
        return
    infos = {i.name: i for i in (*graph.input, *shape_inference.infer_shapes(model).graph.value_info)}
    ranks = {name: len(i.type.tensor_type.shape.dim) for name, i in infos.items()}
    for t in graph.initializer:
        if t.name not in read or len(t.dims) != 1 or t.dims[0] == 1:
            continue
        added = max(ranks.get(read[t.name], 0) - 2, 0)
        t.dims.extend([1] * added)
        for info in (i for i in graph.input if i.name == t.name):
            for _ in range(added):
                info.type.tensor_type.shape.dim.add(dim_value=1)


if __name__ == "__main__":
    sys.stdout.buffer.write(convert(ModelProto.FromString(sys.stdin.buffer.read())).SerializeToString())

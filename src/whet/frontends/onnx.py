"""Reads an ONNX model as a source Network: opsets 9 to the newest of the onnx package."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from whet.errors import FrontendError
from whet.frontends._merged_vectors import separate_merged_vectors
from whet.frontends._onnx_advice import DAMAGED
from whet.frontends._onnx_graph import GraphReader, Scope, mark_value
from whet.frontends._onnx_load import list_initializers, load_model, read_opsets
from whet.frontends._onnx_shapes import SymbolTable, UserShapes, apply_user_shapes, find_plain_names, read_value_type
from whet.frontends._standardized_weights import fold_standardized_weights
from whet.network import Network, TensorType, verify
from whet.ops import FoldBudget

Source = str | os.PathLike | bytes | onnx.ModelProto


def network_from_onnx(source: Source, *, shapes: UserShapes | None = None, folder: str | os.PathLike | None = None) -> Network:
    """Reads an ONNX model from a path, bytes or a ModelProto.

    `shapes` maps inputs to shapes: an int sets a symbolic size, a name renames it, None keeps it. `folder` has the external data
    (default: the model's folder). Names of nodes and tensors are kept; Constant nodes and small constant chains become constants;
    functions are inlined. Sequences of tensors are resolved; an output that is one becomes the outputs `name_0`, `name_1`, ...
    Raises FrontendError for an unreadable model, UnsupportedError for an unsupported one; both name the node.
    """
    model, home = load_model(source)
    return read_model(model, Path(folder) if folder is not None else home, shapes)


def read_model(model: onnx.ModelProto, folder: Path | None, shapes: UserShapes | None, **hooks) -> Network:
    """The Network of a loaded model; `hooks` go to the GraphReader (see check_onnx)."""
    graph = model.graph
    table = SymbolTable(find_plain_names(_list_real_inputs(graph)))
    types = read_input_types(graph, table, shapes)
    net = Network(graph.name or "network")
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    reader = GraphReader(functions, folder, table, budget=FoldBudget(sum(len(t.raw_data) for t in graph.initializer)), **hooks)
    outputs = reader.read(graph, Scope(net, folder), read_opsets(model.opset_import, "the model"), types)
    if not len(graph.output):
        raise FrontendError("the model has no outputs, so there is nothing to compute. Export it again.")
    names = [info.name for info in graph.output]
    if len(set(names)) != len(names):
        raise FrontendError(f"two outputs have one name, among {', '.join(names)}. {DAMAGED}")
    net.metadata = {**net.metadata, **get_metadata(model)}
    if len(outputs) != len(names):
        return net  # read with on_problem: an output was not reached
    for t, name in zip(outputs, names, strict=True):
        mark_value(net, t, name)
    separate_merged_vectors(net)
    fold_standardized_weights(net, reader.budget)
    return verify(net, types=False)


def read_input_types(graph: onnx.GraphProto, table: SymbolTable, shapes: UserShapes | None) -> dict[str, TensorType]:
    """Types of the model's inputs, without initializers that are listed as inputs."""
    declared = {i.name: read_value_type(i, table, f"the input {i.name!r}", (shapes or {}).get(i.name)) for i in _list_real_inputs(graph)}
    return apply_user_shapes(declared, shapes, table)


def get_metadata(model: onnx.ModelProto) -> dict[str, str]:
    """The model's metadata: opset, producer, and its properties with the prefix `prop.`."""
    metadata = {"format": "onnx", "opset": str(read_opsets(model.opset_import, "the model").get("", 0))}
    for key in ("producer_name", "producer_version", "domain", "doc_string"):
        if value := getattr(model, key):
            metadata[key] = value
    metadata.update({f"prop.{p.key}": p.value for p in model.metadata_props})
    return metadata


def _list_real_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    weights = {name for name, _ in list_initializers(graph)}
    return [i for i in graph.input if i.name not in weights]

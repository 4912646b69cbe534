"""A network at any stage as an ONNX file to look at: viewers such as Netron show fused layers as functions that can be opened.

Other than `save_onnx` the file is not meant to be run: layers that ONNX lacks are nodes of the domain "whet", and files of one folder share their
weights.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, helper

from whet.errors import FrontendError, UnsupportedError
from whet.frontends._onnx_tensors import ONNX_OF_DTYPE
from whet.frontends.onnx_writer import OPSET, Writer
from whet.network import Layer, Network

DOMAIN = "whet"
WEIGHTS = "weights.bin"
_INLINE = 256  # bytes; larger constants are in the shared file


class DiagramFolder:
    """A folder of diagrams that share the file of weights: a weight that several networks have is stored once."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._offsets: dict[bytes, int] = {}
        self._size = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / WEIGHTS).write_bytes(b"")
        except OSError as e:
            raise FrontendError(f"cannot write the folder {folder}: {e.strerror}; choose another path") from e

    def save(self, net: Network, name: str) -> Path:
        """Writes `net` as NAME.onnx and, in whet's text form, as NAME.txt; returns the path of the first. Raises FrontendError."""
        model = make_diagram(net)
        path = self.folder / f"{name}.onnx"
        try:
            with open(self.folder / WEIGHTS, "ab") as f:
                for graph_tensor in model.graph.initializer:
                    self._share(graph_tensor, f)
            path.write_bytes(model.SerializeToString())
            path.with_suffix(".txt").write_text(str(net) + "\n", encoding="utf-8")
        except OSError as e:
            raise FrontendError(f"cannot write {path}: {e.strerror}; choose another folder") from e
        return path

    def _share(self, t: onnx.TensorProto, f: Any) -> None:
        data = t.raw_data
        if len(data) <= _INLINE:
            return
        key = hashlib.sha256(data).digest()
        if key not in self._offsets:
            self._offsets[key] = self._size
            f.write(data)
            self._size += len(data)
        t.ClearField("raw_data")
        t.data_location = onnx.TensorProto.EXTERNAL
        for name, value in (("location", WEIGHTS), ("offset", self._offsets[key]), ("length", len(data))):
            t.external_data.add(key=name, value=str(value))


def make_diagram(net: Network) -> ModelProto:
    """The network as an ONNX model with one node per layer; a fused layer is a call of a function of its operations."""
    writer = _DiagramWriter(OPSET, {}, set())
    graph = writer.graph(net, net.name or "network")
    for t in (t for layer in net.layers for t in layer.outputs):
        if t in writer.names and t not in net.outputs:
            shape = [d if isinstance(d, int) else str(d) for d in t.shape]
            graph.value_info.append(helper.make_tensor_value_info(writer.names[t], ONNX_OF_DTYPE[t.dtype], shape))
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, producer_name="whet", functions=list(writer.functions.values()))
    model.metadata_props.add(key="stage", value=net.stage)
    return model


class _DiagramWriter(Writer):
    """A writer that keeps layers: fused layers are functions, and layers without an equivalent in ONNX nodes of whet's domain."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.functions: dict[bytes, FunctionProto] = {}  # by content

    def layer(self, layer: Layer) -> None:
        if layer.op == "Fused":
            function = self._function(layer)
            self._call(function.name, layer, {})
            return
        if layer.op == "Reformat":
            self._call("Reformat", layer, layer.attrs)
            return
        nodes, initializers = len(self.nodes), len(self.initializers)
        try:
            super().layer(layer)
        except UnsupportedError:
            del self.nodes[nodes:], self.initializers[initializers:]
            self._call(layer.op, layer, layer.attrs)

    def subgraph(self, region: Network, name: str) -> Any:
        inner = _DiagramWriter(self.opset, self.names, self.taken, self.symbols)
        inner.functions = self.functions
        return inner.graph(region, name)

    def _call(self, op: str, layer: Layer, attrs: Any) -> None:
        node = helper.make_node(
            op, [self.name(t) for t in layer.inputs], [self.name(t) for t in layer.outputs], name=self._node_name(layer.name), domain=DOMAIN,
            doc_string=" + ".join(layer.sources),
        )  # fmt: skip
        node.attribute.extend(helper.make_attribute(k, str(v)) for k, v in sorted(attrs.items()) if v is not None)
        self.nodes.append(node)

    def _function(self, layer: Layer) -> FunctionProto:
        """The body as a function; equal bodies share one. Constants of the body are nodes in it."""
        body = layer.regions["body"]
        inner = _DiagramWriter(self.opset, {}, set())
        inner.functions = self.functions
        graph = inner.graph(body, "body")
        nodes = [_make_constant_node(t) for t in graph.initializer] + list(graph.node)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid(DOMAIN, 1)]
        inputs, outputs = ([x.name for x in ends] for ends in (graph.input, graph.output))
        function = helper.make_function(DOMAIN, "body", inputs, outputs, nodes, imports)
        key = function.SerializeToString(deterministic=True)
        if key not in self.functions:
            ops = "+".join(x.op for x in body.layers if x.op not in ("Reshape", "Identity"))
            wish = f"{layer.composite}: {ops}" if layer.composite not in ops.split("+") else ops or layer.composite
            taken = {f.name for f in self.functions.values()}
            function.name = wish if wish not in taken else next(n for k in range(2, len(taken) + 3) if (n := f"{wish} ({k})") not in taken)
            self.functions[key] = function
        return self.functions[key]


def _make_constant_node(t: onnx.TensorProto) -> NodeProto:
    return helper.make_node("Constant", [], [t.name], value=t)

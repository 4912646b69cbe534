"""Writes a Network as an ONNX model: symbols become dim_params, regions subgraphs, fused layers their bodies; names are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

from whet.errors import FrontendError, UnsupportedError
from whet.files import LARGEST_MESSAGE, write_onnx
from whet.frontends._onnx_attrs import get_attribute_kind
from whet.frontends._onnx_tensors import ONNX_OF_DTYPE
from whet.network import Dim, DType, Expr, Layer, Network, Tensor, TensorType, get_dtype
from whet.network.dims import lower
from whet.ops import get_op

OPSET = 21  # ONNX Runtime 1.31 loads up to 26, but has CPU kernels of every op only to about here
_FIRST_OPSET = {"f8e4m3fnuz": 19, "f8e5m2fnuz": 19, "f4e2m1": 23, "i2": 25, "u2": 25}


def onnx_from_network(net: Network, opset: int = OPSET) -> onnx.ModelProto:
    """The network as an ONNX model; reading the model gives an equivalent network.

    Raises FrontendError for an opset that the onnx package does not support, UnsupportedError for a layer without an equivalent in this opset.
    """
    if not 13 <= opset <= onnx.defs.onnx_opset_version():
        raise FrontendError(f"whet writes opsets 13 to {onnx.defs.onnx_opset_version()}, not {opset}.")
    for t in net.tensors():
        if opset < (first := _FIRST_OPSET.get(t.dtype.name, 0)):
            raise UnsupportedError(f"%{t.name} has the element type {t.dtype}, which is not available in opset {opset}; write opset {first} or newer")
    graph = Writer(opset, {}, set()).graph(net, net.name or "network")
    own = helper.make_opsetid("", opset)
    imports = [own, *(helper.make_opsetid(domain, 1) for domain in sorted(_list_domains(graph)))]
    model = helper.make_model(graph, opset_imports=imports, producer_name="whet", ir_version=helper.find_min_ir_version_for([own]))
    for key, value in net.metadata.items():
        if key.startswith("prop."):
            model.metadata_props.add(key=key[5:], value=value)
    return model


def _list_domains(graph: GraphProto) -> set[str]:
    """Domains of the graph's nodes besides ONNX's own, those of subgraphs included."""
    domains = {node.domain for node in graph.node if node.domain}
    return domains.union(*(_list_domains(a.g) for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH))


def save_onnx(net: Network, path: str | os.PathLike, opset: int = OPSET) -> Path:
    """Writes the network to `path`; weights beyond 1.9 GB go to `<path>.data`. Returns the path."""
    path = Path(path)
    model = onnx_from_network(net, opset)
    try:
        write_onnx(model, path, onnx.save, LARGEST_MESSAGE)
    except OSError as e:
        raise FrontendError(f"cannot write {path}: {e.strerror}. Free disk space, or check that the folder exists and is writable.") from e
    return path


class Writer:
    """Writes one graph. An op's `to_onnx(layer, w)` uses `w.node`, `w.name`, `w.constant`, `w.dims` and `w.opset`.

    `names` maps tensors to ONNX names, including outer graphs': a subgraph must not redefine a name.
    """

    def __init__(self, opset: int, names: Mapping[Tensor, str], taken: set[str], symbols: Mapping[str, tuple[str, int]] | None = None):
        self.opset = opset
        self.names: dict[Tensor, str] = dict(names)
        self.taken = taken
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.node_names: set[str] = set()
        self.symbols: dict[str, tuple[str, int]] = dict(symbols or {})  # symbol -> (ONNX name of an input, axis of this size)
        self._sizes: dict[Dim, str] = {}

    def graph(self, net: Network, name: str) -> GraphProto:
        """`net` as a GraphProto."""
        constants = set(net.constants.values())
        output_names: dict[Tensor, str] = {}  # constants that are outputs: the output keeps the name, the initializer gets another
        for t in (*net.inputs, *net.outputs):  # inputs and outputs keep their names even if another tensor has the same
            if t not in constants:
                self.names.setdefault(t, self.fresh(t.name))
            elif t not in output_names:
                output_names[t] = self.fresh(t.name)
        for t in net.inputs:
            for axis, d in enumerate(t.shape):
                self.symbols.setdefault(str(d), (self.names[t], axis))
        defined = {t for layer in net.layers for t in layer.outputs}
        for t in net.constants.values():
            self.names.setdefault(t, self.fresh(t.name))
            self.initializers.append(_make_tensor_proto(t.array(), self.names[t]))
        for layer in net.layers:
            self.layer(layer)
        outputs = []
        for t in net.outputs:
            out = self.names[t]
            if t not in defined:  # an input, a constant or a captured value: ONNX requires a node in between
                out = output_names.pop(t, "") or self.fresh(f"{t.name}_out")
                self.node("Identity", [self.names[t]], [out])
            outputs.append(_make_value_info(out, t.type))
        inputs = [_make_value_info(self.names[t], t.type) for t in net.inputs]
        return helper.make_graph(self.nodes, name, inputs, outputs, self.initializers)

    def layer(self, layer: Layer) -> None:
        """The node(s) of one layer."""
        if layer.op == "Fused":
            self._unfused(layer)
            return
        if layer.op == "Reformat":
            self.node("Identity", [self.name(layer.inputs[0])], [self.name(layer.output)], name=layer.name)
            return
        o = get_op(layer.op)
        if o.to_onnx is not None:
            o.to_onnx(layer, self)
            return
        what = f"{layer.op} '{layer.name}'"
        try:
            declared = onnx.defs.get_schema(layer.op, self.opset, "").attributes
        except onnx.defs.SchemaError:
            raise UnsupportedError(
                f"{what} is not an op of ONNX opset {self.opset}. Write a newer opset, or the network before lowering."
            ) from None
        attrs = {}
        for key, v in layer.attrs.items():
            if key in declared:
                attrs[key] = v
            elif v is not None and v != o.attrs.get(key):
                raise UnsupportedError(f"{what}: ONNX opset {self.opset} has no attribute {key} (here {v!r}). Write a newer opset.")
        regions = {k: self.subgraph(r, k) for k, r in layer.regions.items()}
        self.node(
            layer.op, [self.name(t) for t in layer.inputs], [self.name(t) for t in layer.outputs], name=layer.name, **attrs, **regions
        )

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str = "", domain: str = "", **attrs: Any) -> None:
        """Adds one node; attributes are whet's values (DType, static dims, tuples, bools, arrays) or GraphProtos. None is omitted."""
        trimmed = list(inputs)
        while trimmed and not trimmed[-1]:
            trimmed.pop()
        made = helper.make_node(op, trimmed, list(outputs), name=self._node_name(name or op.lower()), domain=domain)
        for key, v in sorted(attrs.items()):
            if v is not None:
                made.attribute.append(_make_attribute(key, v, op, name))
        self.nodes.append(made)

    def name(self, t: Tensor | None) -> str:
        """The ONNX name of a tensor; "" for an absent one."""
        if t is None:
            return ""
        if t not in self.names:
            self.names[t] = self.fresh(t.name)
            if t.weight is not None:
                self.initializers.append(_make_tensor_proto(t.array(), self.names[t]))
        return self.names[t]

    def constant(self, array: np.ndarray, name: str = "const") -> str:
        """Adds an initializer and returns its name."""
        name = self.fresh(name)
        self.initializers.append(_make_tensor_proto(np.asarray(array), name))
        return name

    def dims(self, values: Sequence[Dim], name: str = "shape") -> str:
        """The name of an i64[n] tensor of sizes: an initializer, or computed from input shapes if a size is symbolic."""
        if all(isinstance(v, int) for v in values):
            return self.constant(np.array(values, np.int64), name)
        out = self.fresh(name)
        self.node("Concat", [self._size(v) for v in values], [out], name=out, axis=0)
        return out

    def _size(self, d: Dim) -> str:
        """The name of an i64[1] tensor holding `d`."""
        if d not in self._sizes:
            self._sizes[d] = self.constant(np.array([d], np.int64), f"size_{d}") if isinstance(d, int) else self._computed(d)
        return self._sizes[d]

    def _computed(self, d: Expr) -> str:
        """Adds nodes for a symbolic size: a sum of products of symbols, quotients, minima and maxima. Sizes are not negative, so Div is //."""
        total = ""
        for factors, c in d.terms:
            term = self._size(c) if c != 1 or not factors else ""
            for atom, power in factors:
                for _ in range(power):
                    term = self._binary("Mul", term, self._atom(atom)) if term else self._atom(atom)
            total = self._binary("Add", total, term) if total else term
        return total

    def _atom(self, atom: tuple) -> str:
        if atom[0] != "sym":
            op = {"floordiv": "Div", "min": "Min", "max": "Max"}[atom[0]]
            return self._binary(op, self._size(lower(atom[1])), self._size(lower(atom[2])))
        if atom[1] not in self.symbols:
            raise UnsupportedError(
                f"the size {atom[1]} is not the size of an input's axis, so ONNX cannot express it. Give the network static shapes first."
            )
        source, axis = self.symbols[atom[1]]
        shape, out = self.fresh(f"{source}_shape"), self.fresh(f"size_{atom[1]}")
        self.node("Shape", [source], [shape], name=shape)
        self.node("Gather", [shape, self.constant(np.array([axis], np.int64), f"axis_{axis}")], [out], name=out, axis=0)
        return out

    def _binary(self, op: str, a: str, b: str) -> str:
        out = self.fresh(f"size_{op.lower()}")
        self.node(op, [a, b], [out], name=out)
        return out

    def fresh(self, wish: str) -> str:
        """An unused value name similar to `wish`."""
        name, i = wish, 0
        while name in self.taken or not name:
            i += 1
            name = f"{wish}_{i}"
        self.taken.add(name)
        return name

    def subgraph(self, region: Network, name: str) -> GraphProto:
        """A region as a subgraph that may read this graph's values."""
        return Writer(self.opset, self.names, self.taken, self.symbols).graph(region, name)

    def _unfused(self, layer: Layer) -> None:
        """Writes the body's layers in place of the fused layer."""
        body = layer.regions["body"]
        for inner, outer in zip(body.inputs, layer.inputs, strict=True):
            self.names[inner] = self.name(outer)
        later = []
        for inner, outer in zip(body.outputs, layer.outputs, strict=True):
            if inner in self.names or inner.weight is not None:
                later.append((inner, outer))
            else:
                self.names[inner] = self.name(outer)
        for x in body.layers:
            self.layer(x)
        for inner, outer in later:
            self.node("Identity", [self.name(inner)], [self.name(outer)], name=layer.name)

    def _node_name(self, wish: str) -> str:
        name, i = wish, 0
        while name in self.node_names:
            i += 1
            name = f"{wish}_{i}"
        self.node_names.add(name)
        return name


def _make_value_info(name: str, t: TensorType) -> onnx.ValueInfoProto:
    if any(isinstance(d, int) and d >= 2**63 for d in t.shape):
        raise UnsupportedError(f"%{name} is of type {t}; ONNX sizes are below 2**63. Check its shapes and pads.")
    return helper.make_tensor_value_info(name, ONNX_OF_DTYPE[t.dtype], [d if isinstance(d, int) else str(d) for d in t.shape])


def _make_tensor_proto(a: np.ndarray, name: str) -> TensorProto:
    """The array as raw little-endian bytes; values below 8 bits are packed, the first in the lowest bits."""
    dtype = get_dtype(a)
    if dtype.bits < 8:
        flat = np.ascontiguousarray(a).reshape(-1)
        values = flat.view(np.uint8) if dtype.is_float else flat.astype(np.int8).view(np.uint8)
        each = 8 // dtype.bits
        rows = np.append(values & ((1 << dtype.bits) - 1), np.zeros(-len(values) % each, np.uint8)).reshape(-1, each)
        raw = np.bitwise_or.reduce(rows << (np.arange(each, dtype=np.uint8) * dtype.bits), axis=1).astype(np.uint8).tobytes()
    else:
        raw = np.ascontiguousarray(a).tobytes()
    return TensorProto(name=name, dims=a.shape, data_type=ONNX_OF_DTYPE[dtype], raw_data=raw)


def _make_attribute(key: str, v: Any, op: str, name: str) -> onnx.AttributeProto:
    """A whet attribute value as an AttributeProto."""
    label = f"{op} '{name}': attribute {key}"
    kind = _find_declared_kind(op, key)
    match v:
        case DType():
            return helper.make_attribute(key, ONNX_OF_DTYPE[v])
        case bool():
            return helper.make_attribute(key, int(v))
        case Expr():
            raise UnsupportedError(f"{label} is the symbolic size {v}; ONNX attributes are constants. Give the network static shapes first.")
        case tuple() | list():
            if any(isinstance(x, Expr) for x in v):
                raise UnsupportedError(
                    f"{label} holds symbolic sizes {v}; ONNX attributes are constants. Give the network static shapes first."
                )
            values = [int(x) if isinstance(x, bool) else x for x in v]
            if kind == onnx.AttributeProto.FLOATS or any(isinstance(x, float) for x in values):
                values = [float(x) for x in values]
            return helper.make_attribute(key, values, attr_type=kind if not values else None)
        case np.ndarray():
            return helper.make_attribute(key, _make_tensor_proto(v, key))
        case int() if kind == onnx.AttributeProto.FLOAT:
            return helper.make_attribute(key, float(v))
        case _:
            return helper.make_attribute(key, v)


def _find_declared_kind(op: str, key: str) -> int | None:
    """The AttributeProto kind that ONNX declares for an op's attribute, or None."""
    if not onnx.defs.has(op):
        return None
    declared = onnx.defs.get_schema(op).attributes.get(key)
    return None if declared is None else get_attribute_kind(declared.type)

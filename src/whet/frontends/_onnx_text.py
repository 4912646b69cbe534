"""Validation of all texts of a model: protobuf returns bytes for a text that is not UTF-8, which is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from whet.errors import FrontendError


def check_texts(model: ModelProto, subject: str) -> None:
    """Raises FrontendError when a name, dim or domain of the model is not UTF-8 text."""
    for text in _iterate_model(model):
        if not isinstance(text, str):
            raise FrontendError(
                f"{subject} holds the name {text!r}, which is not UTF-8 text. The file is damaged: copy or export it again."
            )


def _iterate_model(m: ModelProto) -> Iterator[object]:
    yield from (m.producer_name, m.producer_version, m.domain, m.doc_string)
    yield from (o.domain for o in m.opset_import)
    for p in m.metadata_props:
        yield from (p.key, p.value)
    yield from _iterate_graph(m.graph)
    for f in m.functions:
        yield from _iterate_function(f)


def _iterate_function(f: FunctionProto) -> Iterator[object]:
    yield from (f.name, f.domain, f.overload, *f.input, *f.output, *f.attribute)
    yield from (o.domain for o in f.opset_import)
    yield from _iterate_attributes(f.attribute_proto)
    for n in f.node:
        yield from _iterate_node(n)


def _iterate_graph(g: GraphProto) -> Iterator[object]:
    yield g.name
    for v in (*g.input, *g.output):
        yield from _iterate_value(v)
    for t in g.initializer:
        yield from _iterate_tensor(t)
    for s in g.sparse_initializer:
        yield from _iterate_sparse(s)
    for n in g.node:
        yield from _iterate_node(n)


def _iterate_value(v: ValueInfoProto) -> Iterator[object]:
    yield v.name
    yield from (d.dim_param for d in v.type.tensor_type.shape.dim if d.WhichOneof("value") == "dim_param")


def _iterate_tensor(t: TensorProto) -> Iterator[object]:
    yield t.name
    for e in t.external_data:
        yield from (e.key, e.value)


def _iterate_sparse(s: SparseTensorProto) -> Iterator[object]:
    yield from _iterate_tensor(s.values)
    yield from _iterate_tensor(s.indices)


def _iterate_node(n: NodeProto) -> Iterator[object]:
    yield from (n.name, n.op_type, n.domain, n.overload, *n.input, *n.output)
    yield from _iterate_attributes(n.attribute)


def _iterate_attributes(attributes: Iterable[AttributeProto]) -> Iterator[object]:
    for a in attributes:
        yield from (a.name, a.ref_attr_name)
        if a.HasField("t"):
            yield from _iterate_tensor(a.t)
        if a.HasField("sparse_tensor"):
            yield from _iterate_sparse(a.sparse_tensor)
        for g in [a.g] if a.HasField("g") else a.graphs:
            yield from _iterate_graph(g)

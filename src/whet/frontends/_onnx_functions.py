"""Inlining of ONNX functions: those of the model, and ops that the ONNX standard defines as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TypeProto, defs

from whet.errors import FrontendError
from whet.frontends._onnx_tensors import ONNX_OF_DTYPE
from whet.network import TensorType


def find_schema_function(node: NodeProto, domain: str, opset: int, types: Sequence[TensorType | None]) -> FunctionProto | None:
    """The function body that the ONNX schema gives for the node at this opset, or None."""
    try:
        schema: Any = defs.get_schema(node.op_type, opset, domain)
    except defs.SchemaError:
        return None
    if schema.has_function and len(schema.function_body.node):
        return schema.function_body
    if not schema.has_context_dependent_function:
        return None
    protos = [TypeProto() if t is None else _make_type_proto(t) for t in types]
    try:
        raw = schema.get_context_dependent_function(node.SerializeToString(), [p.SerializeToString() for p in protos])
        body = FunctionProto.FromString(raw)
    except (RuntimeError, ValueError, TypeError, DecodeError):
        return None  # the definition does not accept these inputs: reported as an op without a reader
    return body if len(body.node) else None


def is_defined_by_others(op: str, within: FunctionProto) -> bool:
    """True if ONNX defines `op` as a function at the opset that `within` uses."""
    version = next((o.version for o in within.opset_import if o.domain == ""), 1)
    try:
        schema: Any = defs.get_schema(op, version, "")
    except defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _make_type_proto(t: TensorType) -> TypeProto:
    return onnx.helper.make_tensor_type_proto(ONNX_OF_DTYPE[t.dtype], [d if isinstance(d, int) else str(d) for d in t.shape])


def list_schema_defaults(op: str, domain: str, opset: int) -> list[AttributeProto]:
    """Default attributes of an op, used by its function body when a node omits them."""
    declared = defs.get_schema(op, opset, domain).attributes.values()
    return [a.default_value for a in declared if a.default_value.name]


def expand(call: NodeProto, f: FunctionProto, name: str, defaults: Sequence[AttributeProto] = ()) -> list[NodeProto]:
    """The nodes of `f` inlined for one call named `name`: values renamed, attributes substituted."""
    if len(call.input) > len(f.input) or len(call.output) > len(f.output):
        raise FrontendError(
            f"node '{name}' calls the function {f.name} with {len(call.input)} inputs and {len(call.output)} outputs; "
            f"it has {len(f.input)} and {len(f.output)}. Export the model again."
        )
    names: dict[str, str] = {"": ""}
    for i, n in enumerate(f.input):
        names[n] = call.input[i] if i < len(call.input) else ""
    head: list[NodeProto] = []
    for i, n in enumerate(f.output):
        out = call.output[i] if i < len(call.output) else ""
        if not out:
            continue
        if n in names:  # an output that is also an input or another output
            head.append(onnx.helper.make_node("Identity", [names[n]], [out], name=f"{name}/{n}"))
        else:
            names[n] = out
    given = {a.name: a for a in call.attribute}
    otherwise = {a.name: a for a in (*defaults, *f.attribute_proto)}

    def rename_value(n: str) -> str:
        if n not in names:
            names[n] = f"{name}/{n}"
        return names[n]

    body = []
    for i, node in enumerate(f.node):
        new = NodeProto()
        new.CopyFrom(node)
        new.name = f"{name}/{node.name or f'{node.op_type.lower()}_{i}'}"
        _rename(new, rename_value, given, otherwise)
        body.append(new)
    return body + head


def _rename(node: NodeProto, renamed: Callable[[str], str], names, defaults) -> None:
    """Renames a node's values in place and resolves attribute references, including those in subgraphs."""
    node.input[:] = [renamed(n) for n in node.input]
    node.output[:] = [renamed(n) for n in node.output]
    kept: list[AttributeProto] = []
    for a in node.attribute:
        if a.ref_attr_name:
            value = names.get(a.ref_attr_name) or defaults.get(a.ref_attr_name)
            if value is None:
                continue  # neither given nor with a default: the op's own default applies
            actual = AttributeProto()
            actual.CopyFrom(value)
            actual.name = a.name
            kept.append(actual)
            continue
        for sub in [a.g] if a.type == AttributeProto.GRAPH else a.graphs:
            _rename_graph(sub, renamed, names, defaults)
        kept.append(a)
    copies = [AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(copies)


def _rename_graph(sub: GraphProto, renamed, names, defaults) -> None:
    for v in (*sub.input, *sub.output, *sub.initializer, *(s.values for s in sub.sparse_initializer)):
        v.name = renamed(v.name)
    for node in sub.node:
        _rename(node, renamed, names, defaults)

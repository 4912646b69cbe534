"""ONNX attributes -> Python values; validation of a node against the ONNX schema of its op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx import AttributeProto, NodeProto, defs

from whet.errors import FrontendError
from whet.frontends._onnx_advice import DAMAGED, make_unsupported_error
from whet.frontends._onnx_tensors import read_onnx_array, read_sparse_array

_A = AttributeProto


def read_node_attributes(node: NodeProto, name: str, domain: str, folder: Path | None) -> dict[str, Any]:
    """Attributes (except graphs) as ints, floats, strings, tuples, arrays. Raises FrontendError or UnsupportedError naming the node."""
    attrs: dict[str, Any] = {}
    for a in node.attribute:
        what = f"node '{name}' ({node.op_type}): attribute {a.name}"
        if a.ref_attr_name:
            raise FrontendError(f"{what} refers to {a.ref_attr_name!r} of a function, but the node is not in a function. Export the model again.")
        if a.name in attrs:
            raise FrontendError(f"{what} is given twice. {DAMAGED}")
        match a.type:
            case _A.GRAPH | _A.GRAPHS | _A.TYPE_PROTO | _A.TYPE_PROTOS:  # the types of Optional are those of its values
                continue
            case _A.INT:
                attrs[a.name] = a.i
            case _A.FLOAT:
                attrs[a.name] = a.f
            case _A.STRING:
                attrs[a.name] = _decode_text(a.s, what)
            case _A.INTS:
                attrs[a.name] = tuple(a.ints)
            case _A.FLOATS:
                attrs[a.name] = tuple(a.floats)
            case _A.STRINGS:
                attrs[a.name] = tuple(_decode_text(s, what) for s in a.strings)
            case _A.TENSOR:
                attrs[a.name] = read_onnx_array(a.t, folder, what)
            case _A.SPARSE_TENSOR:
                attrs[a.name] = read_sparse_array(a.sparse_tensor, folder, what)
            case _:
                kind = _A.AttributeType.Name(a.type) if a.type in _A.AttributeType.values() else f"kind {a.type}"
                raise make_unsupported_error(
                    name, domain, node.op_type, f"its attribute {a.name} is of the kind {kind}; export it as a tensor or as numbers"
                )
    return attrs


def check_form(node: NodeProto, name: str, domain: str, opset: int) -> None:
    """Validates the numbers of inputs and outputs and the attributes against the schema. Raises FrontendError naming the node."""
    try:
        schema = defs.get_schema(node.op_type, opset, domain)
    except defs.SchemaError:
        return  # unknown to ONNX: the reader of the op validates it
    what = f"node '{name}' ({node.op_type}, opset {opset})"
    given = len(node.input)
    while given and not node.input[given - 1]:
        given -= 1
    if not schema.min_input <= given <= schema.max_input:
        raise FrontendError(f"{what} has {given} inputs, the op takes {_format_span(schema.min_input, schema.max_input)}. {DAMAGED}")
    for i, formal in enumerate(schema.inputs):
        if formal.option == defs.OpSchema.FormalParameterOption.Single and (i >= given or not node.input[i]):
            raise FrontendError(f"{what}: its input {formal.name} is missing. {DAMAGED}")
    if len(node.output) > schema.max_output:
        raise FrontendError(
            f"{what} has {len(node.output)} outputs, the op has {_format_span(schema.min_output, schema.max_output)}. Export the model again."
        )
    for a in node.attribute:
        want = schema.attributes.get(a.name)
        if want is not None and get_attribute_kind(want.type) != a.type:
            raise FrontendError(f"{what}: its attribute {a.name} is of the kind {a.type}, the op wants {get_attribute_kind(want.type)}. {DAMAGED}")
    have = {a.name for a in node.attribute}
    for key, want in schema.attributes.items():
        if want.required and key not in have:
            raise FrontendError(f"{what} needs the attribute {key}. {DAMAGED}")


def get_attribute_kind(declared: Any) -> int:
    """The AttributeProto kind behind a schema's attribute type (an enum in new onnx, an int in older ones)."""
    return int(getattr(declared, "value", declared))


def _format_span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}" if high < 2**31 - 1 else f"{low} or more"


def _decode_text(raw: bytes, subject: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise FrontendError(f"{subject} is not text. {DAMAGED}") from e

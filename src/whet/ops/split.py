"""Split: splits a tensor along `axis` into parts with the sizes of input 1 (or attribute `split`), or into `num_outputs` equal ones."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import ceildiv
from whet.ops._axes import convert_attributes_to_inputs, make_attribute_exporter
from whet.ops._base import INT, INTS, Couple, find_given_dims, fold_dims, op, replace_given, to_ints
from whet.ops._types import normalize_axis


def list_part_sizes(layer):
    """The parts' sizes along the axis."""
    x = layer.inputs[0]
    n = x.shape[normalize_axis(layer.attrs["axis"], x.type.rank)]
    parts, count = find_given_dims(layer, "split", 1), layer.attrs.get("num_outputs")
    if parts is None:
        if not count:
            raise NetworkError(f"Split '{layer.name}' needs sizes (input 1) or num_outputs")
        each = n // count if (n // count) * count == n else ceildiv(n, count)
        return (*[each] * (count - 1), n - each * (count - 1))
    if all(isinstance(d, int) for d in (*parts, n)) and sum(parts) != n:
        raise NetworkError(f"Split '{layer.name}': sizes {list(parts)} do not sum to {n}")
    if count:
        raise NetworkError(f"Split '{layer.name}' has both sizes and num_outputs; give one of them")
    return parts


def infer(layer):
    x = layer.inputs[0]
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    parts = list_part_sizes(layer)
    if any(isinstance(p, int) and p < 0 for p in parts):
        raise NetworkError(f"sizes {list(parts)} must not be negative")
    return [x.type.with_shape((*x.shape[:axis], p, *x.shape[axis + 1 :])) for p in parts]


def compute_reference(layer, x, split=None):
    axis = layer.attrs["axis"]
    parts = layer.attrs.get("split", split)
    if parts is None:
        each = -(-x.shape[axis] // layer.attrs["num_outputs"])
        ends = [each * (i + 1) for i in range(layer.attrs["num_outputs"] - 1)]
    else:
        ends = np.cumsum(to_ints(parts))[:-1]
    return np.split(x, ends, axis=axis)


def list_couples(layer):
    x = layer.inputs[0]
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    result, at = [], 0
    for y in layer.outputs:
        result += [Couple(x, i, y, i) for i in range(x.type.rank) if i != axis]
        n = y.shape[axis]
        if isinstance(n, int) and isinstance(at, int) and n:
            result.append(Couple(x, axis, y, axis, a_at=at, count=n))
        at = at + n
    return result


def recut(layer, kept_indices):
    axis = normalize_axis(layer.attrs["axis"], layer.inputs[0].type.rank)
    if (layer.inputs[0], axis) not in kept_indices:
        return {}
    parts = [len(kept_indices[y, axis]) if (y, axis) in kept_indices else y.shape[axis] for y in layer.outputs]
    if layer.input(1) is None and layer.attrs.get("split") is None:
        return {1: np.array(parts, np.int64), "num_outputs": None}
    return replace_given(layer, "split", 1, parts)


def shape_value(layer):
    got = fold_dims(layer, 1)
    return got if got != [None] else got * len(list_part_sizes(layer))


def read(node, g):
    """Sizes were an attribute before opset 13; without sizes, one part per output."""
    inputs = convert_attributes_to_inputs(node, g, ["split"])
    attrs = {"axis": node.attrs.get("axis", 0)}
    if len(inputs) < 2 or inputs[1] is None:
        attrs["num_outputs"] = node.attrs.get("num_outputs", len(node.outputs))
    return node.add(g, "Split", *inputs, **attrs)


def to_onnx(layer, w):
    """Before opset 18 equal parts are implied by the number of outputs; unequal parts need sizes."""
    if w.opset >= 18 or layer.attrs.get("num_outputs") is None:
        make_attribute_exporter("split")(layer, w)
        return
    parts = list_part_sizes(layer)
    inputs = [w.name(layer.inputs[0])]
    if len(set(parts)) > 1:
        if not all(isinstance(p, int) for p in parts):
            raise UnsupportedError(f"Split '{layer.name}' in {len(parts)} unequal parts of a dynamic size needs opset 18 or newer")
        inputs.append(w.constant(np.array(parts, np.int64), f"{layer.name}.split"))
    w.node("Split", inputs, [w.name(t) for t in layer.outputs], name=layer.name, axis=layer.attrs["axis"])


op(
    "Split",
    infer,
    compute_reference,
    attrs={"axis": 0, "num_outputs": INT, "split": INTS},
    couples=list_couples,
    zeros=(),
    recut=recut,
    onnx=read,
    shape_value=shape_value,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,12,4]", np.array([3, 4, 5])], {"axis": 1}),
        (["f32[2,3,12]"], {"axis": -1, "num_outputs": 3}),
        (["f32[7,2]"], {"num_outputs": 3}),
        (["extreme f32[3,16]", np.array([5, 11])], {"axis": 1}),
        (["f32[6,2]"], {"split": (2, 4)}),
        (["i64[4]"], {"num_outputs": 2}),
    ],
)

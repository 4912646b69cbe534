"""Pad: `mode` constant (with the value of input 2), reflect, edge or wrap. Pads (input 1, or attribute) are begins, then ends, of
the axes of input 3 (all without it); negative pads crop. Pads may follow from dynamic sizes."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import convert_attributes_to_inputs, make_attribute_exporter, needs_opset
from whet.ops._base import INTS, Couple, find_given_dims, find_given_ints, op, replace_given, to_ints
from whet.ops._types import normalize_axis

MODES = ("constant", "reflect", "edge", "wrap")


def pad_amounts(layer):
    """(before, after) for each axis of x."""
    x, pads = layer.inputs[0], find_given_dims(layer, "pads", 1)
    axes = find_given_ints(layer, "axes", 3)
    axes = tuple(range(x.type.rank)) if axes is None else tuple(normalize_axis(a, x.type.rank) for a in axes)
    if pads is None or len(pads) != 2 * len(axes):
        raise NetworkError(f"Pad '{layer.name}' needs two pads per axis, begins and then ends, not {pads} for {len(axes)} axes")
    result = [(0, 0)] * x.type.rank
    for i, a in enumerate(axes):
        result[a] = (pads[i], pads[i + len(axes)])
    return result


def find_shift(layer):
    """(axis, positions added in front) of a Pad with zeros that keeps the shape and changes one axis, or None."""
    pads = layer.attrs.get("pads")
    if layer.attrs.get("mode", "constant") != "constant" or pads is None or any(t is not None for t in layer.inputs[1:]):
        return None
    if not all(isinstance(p, int) for p in pads):
        return None
    rank = len(pads) // 2
    moved = [k for k in range(rank) if pads[k] or pads[rank + k]]
    return (moved[0], int(pads[moved[0]])) if len(moved) == 1 and pads[moved[0]] == -pads[rank + moved[0]] else None


def infer(layer):
    x, mode = layer.inputs[0], layer.attrs["mode"]
    if mode not in MODES:
        raise NetworkError(f"Pad's mode is one of {', '.join(MODES)}, not {mode!r}")
    value = layer.input(2)
    if value is not None and (value.dtype != x.dtype or value.shape not in ((), (1,))):
        raise NetworkError(f"pads {x.type} with one value of its type, not {value.type}")
    shape = [d + a + b for d, (a, b) in zip(x.shape, pad_amounts(layer), strict=True)]
    for d, n, (a, b) in zip(shape, x.shape, pad_amounts(layer), strict=True):
        if (
            all(isinstance(k, int) for k in (d, n, a, b))
            and (n + min(a, 0) + min(b, 0) < (mode != "constant") or (mode == "reflect" and max(a, b) >= max(n, 1)))
        ):
            raise NetworkError(f"pads {(a, b)} are invalid for an axis of {n} in mode {mode}")
    return x.type.with_shape(shape)


def compute_reference(layer, x, pads=None, value=None, axes=None):
    pads = to_ints(layer.attrs.get("pads", pads))
    axes = layer.attrs.get("axes", axes)
    axes = range(x.ndim) if axes is None else [a % x.ndim for a in to_ints(axes)]
    both = [(0, 0)] * x.ndim
    for i, a in enumerate(axes):
        both[a] = (pads[i], pads[i + len(axes)])
    x = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(x.shape, both, strict=True))]
    both = [(max(a, 0), max(b, 0)) for a, b in both]
    if layer.attrs["mode"] == "constant":
        return np.pad(x, both, constant_values=x.dtype.type(0) if value is None else value.reshape(()))
    return np.pad(x, both, mode=layer.attrs["mode"])


def list_couples(layer):
    """Axes without padding are coupled one to one; with constant padding x is a range of y and the padding is free."""
    x, y, result = layer.inputs[0], layer.output, []
    for i, (a, b) in enumerate(pad_amounts(layer)):
        if (a, b) == (0, 0):
            result.append(Couple(x, i, y, i))
        elif layer.attrs["mode"] == "constant" and all(isinstance(k, int) for k in (a, b, x.shape[i])) and min(a, b) >= 0:
            result.append(Couple(x, i, y, i, b_at=a, count=x.shape[i]))
    return result


def recut(layer, kept_indices):
    """Updates the pads."""
    x, y, both = layer.inputs[0], layer.output, pad_amounts(layer)
    changed = False
    for i, (a, b) in enumerate(both):
        if (y, i) in kept_indices and (a, b) != (0, 0):
            at = kept_indices[y, i]
            both[i] = (int(np.sum(at < a)), int(np.sum(at >= y.shape[i] - b)))
            changed = changed or both[i] != (a, b)
    if not changed:
        return {}
    axes = find_given_ints(layer, "axes", 3)
    axes = range(x.type.rank) if axes is None else axes
    return replace_given(layer, "pads", 1, [*(both[a][0] for a in axes), *(both[a][1] for a in axes)])


def read(node, g):
    """Pads and value were attributes before opset 11."""
    mode = node.attrs.get("mode", "constant")
    if node.opset >= 11:
        return node.add(g, "Pad", *node.inputs, mode=mode)
    inputs = convert_attributes_to_inputs(node, g, ["pads"])
    value = node.attrs.get("value", 0.0)
    if value:
        inputs.append(g.constant(np.array(value, node.inputs[0].dtype.numpy), f"{node.name}.value"))
    return node.add(g, "Pad", *inputs, mode=mode)


def to_onnx(layer, w):
    """Before opset 18 pads are given for all axes."""
    if layer.attrs["mode"] == "wrap":
        needs_opset(layer, w, 19, "mode wrap")
    if w.opset >= 18 or find_given_ints(layer, "axes", 3) is None:
        make_attribute_exporter("pads", "value", "axes")(layer, w)
        return
    both = pad_amounts(layer)
    pads = w.constant(np.array([*(a for a, _ in both), *(b for _, b in both)], np.int64), f"{layer.name}.pads")
    inputs = [w.name(layer.inputs[0]), pads, w.name(layer.input(2))]
    w.node("Pad", inputs, [w.name(layer.output)], name=layer.name, mode=layer.attrs["mode"])


op(
    "Pad",
    infer,
    compute_reference,
    attrs={"mode": "constant", "pads": INTS, "axes": INTS},
    couples=list_couples,
    recut=recut,
    onnx=read,
    to_onnx=to_onnx,
    samples=[
        (["f32[2,3,4,5]", np.array([0, 0, 1, 2, 0, 0, 3, 0])], {}),
        (["f32[2,4,3]", np.array([0, 2, 0, 0, 3, 0]), np.array(1.5, np.float32)], {}),
        (["f32[2,5,4]", np.array([0, 1, 2, 0, 3, 1])], {"mode": "reflect"}),
        (["f32[2,5,4]", np.array([0, 1, 2, 0, 3, 1])], {"mode": "edge"}),
        (["f32[2,5,4]", np.array([0, 1, 2, 0, 3, 1])], {"mode": "wrap"}),
        (["f32[2,5,4]", np.array([0, -1, 2, 0, 1, -2])], {}),
        (["extreme f32[3,16]", np.array([1, 2]), None, np.array([-1])], {}),
        (["f32[3,4]"], {"pads": (1, 0, 0, 1)}),
        (["f32[2,3,5,8]", np.array([0, 1, 0, 0, 0, 2, 3, 0]), np.array(-2.5, np.float32)], {}),
        (["f32[2,4,6]", np.array([1, 2, 0, 0, 1, 0])], {"mode": "reflect"}),
    ],
)

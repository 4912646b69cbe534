"""Unsqueeze: inserts axes of size 1 at the output positions given by input 1 or attribute `axes`."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import convert_attributes_to_inputs, find_given_axes, make_attribute_exporter, map_axes
from whet.ops._base import INTS, find_given_ints, keep_dims, op


def list_added_axes(layer):
    axes = find_given_ints(layer, "axes", 1)
    if axes is None:
        raise NetworkError(f"Unsqueeze '{layer.name}' needs axes")
    return find_given_axes(layer, layer.inputs[0].type.rank + len(axes))


def infer(layer):
    x, axes = layer.inputs[0], list_added_axes(layer)
    rest = iter(x.shape)
    return x.type.with_shape(1 if i in axes else next(rest) for i in range(x.type.rank + len(axes)))


def compute_reference(layer, x, axes=None):
    axes = layer.attrs.get("axes", axes)
    return np.expand_dims(x, tuple(int(a) for a in np.ravel(axes)))


def list_couples(layer):
    x, axes = layer.inputs[0], list_added_axes(layer)
    rest = [i for i in range(layer.output.type.rank) if i not in axes]
    return map_axes(x, layer.output, dict(enumerate(rest)))


op(
    "Unsqueeze",
    infer,
    compute_reference,
    attrs={"axes": INTS},
    couples=list_couples,
    zeros=(),
    shape_value=keep_dims,
    onnx=lambda node, g: node.add(g, "Unsqueeze", *convert_attributes_to_inputs(node, g, ["axes"])),
    to_onnx=make_attribute_exporter("axes"),
    samples=[
        (["f32[2,17]", np.array([2, 3])], {}),
        (["f32[3,4]", np.array([0, -1])], {}),
        (["extreme f32[13]"], {"axes": (1,)}),
        (["i64[]", np.array([0])], {}),
    ],
)

"""Unsqueeze: inserts axes of size 1 at the output positions given by input 1 or attribute `axes`."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import attributes_as_inputs, axes_given, inputs_of_attributes, map_axes
from whet.ops._base import INTS, given_ints, keep_dims, op


def added_axes(layer):
    axes = given_ints(layer, "axes", 1)
    if axes is None:
        raise NetworkError(f"Unsqueeze '{layer.name}' needs axes")
    return axes_given(layer, layer.inputs[0].type.rank + len(axes))


def infer(layer):
    x, axes = layer.inputs[0], added_axes(layer)
    rest = iter(x.shape)
    return x.type.with_shape(1 if i in axes else next(rest) for i in range(x.type.rank + len(axes)))


def reference(layer, x, axes=None):
    axes = layer.attrs.get("axes", axes)
    return np.expand_dims(x, tuple(int(a) for a in np.ravel(axes)))


def couples(layer):
    x, axes = layer.inputs[0], added_axes(layer)
    rest = [i for i in range(layer.output.type.rank) if i not in axes]
    return map_axes(x, layer.output, dict(enumerate(rest)))


op(
    "Unsqueeze",
    infer,
    reference,
    attrs={"axes": INTS},
    couples=couples,
    zeros=(),
    shape_value=keep_dims,
    onnx=lambda node, g: node.add(g, "Unsqueeze", *attributes_as_inputs(node, g, ["axes"])),
    to_onnx=inputs_of_attributes("axes"),
    samples=[
        (["f32[2,17]", np.array([2, 3])], {}),
        (["f32[3,4]", np.array([0, -1])], {}),
        (["extreme f32[13]"], {"axes": (1,)}),
        (["i64[]", np.array([0])], {}),
    ],
)

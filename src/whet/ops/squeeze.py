"""Squeeze: removes axes of size 1: the given ones (input 1, or attribute `axes`), or all."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Expr
from whet.ops._axes import attributes_as_inputs, axes_given, inputs_of_attributes, map_axes
from whet.ops._base import INTS, keep_dims, op


def removed_axes(layer):
    """The removed axes."""
    x = layer.inputs[0]
    axes = axes_given(layer, x.type.rank)
    if axes is None:
        if any(isinstance(d, Expr) for d in x.shape):
            raise UnsupportedError(f"Squeeze '{layer.name}': the size-1 axes of {x.type} are known only at run time; give the axes")
        return tuple(i for i, d in enumerate(x.shape) if d == 1)
    for a in axes:
        if isinstance(x.shape[a], int) and x.shape[a] != 1:
            raise NetworkError(f"Squeeze '{layer.name}': axis {a} of {x.type} is not 1")
    return axes


def infer(layer):
    x, axes = layer.inputs[0], removed_axes(layer)
    return x.type.with_shape(d for i, d in enumerate(x.shape) if i not in axes)


def reference(layer, x, axes=None):
    axes = layer.attrs.get("axes", axes)
    return x.squeeze(None if axes is None else tuple(int(a) for a in np.ravel(axes)))


def couples(layer):
    x, axes = layer.inputs[0], removed_axes(layer)
    rest = [i for i in range(x.type.rank) if i not in axes]
    return map_axes(x, layer.output, {a: b for b, a in enumerate(rest)})


def recut(layer, kept_indices):
    """Sets the axes explicitly, since an axis pruned to size 1 would be removed too."""
    return {1: np.array(removed_axes(layer), np.int64)} if axes_given(layer, layer.inputs[0].type.rank) is None else {}


op(
    "Squeeze",
    infer,
    reference,
    attrs={"axes": INTS},
    couples=couples,
    zeros=(),
    recut=recut,
    shape_value=keep_dims,
    onnx=lambda node, g: node.add(g, "Squeeze", *attributes_as_inputs(node, g, ["axes"])),
    to_onnx=inputs_of_attributes("axes"),
    samples=[
        (["f32[2,17,1,1]", np.array([2, 3])], {}),
        (["f32[1,3,1,4]", np.array([-2])], {}),
        (["f32[1,3,1,4]"], {}),
        (["extreme f32[13,1]"], {"axes": (1,)}),
        (["i64[1]", np.array([0])], {}),
    ],
)

"""Squeeze: removes axes of size 1: the given ones (input 1, or attribute `axes`), or all."""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Expr
from whet.ops._axes import convert_attributes_to_inputs, find_given_axes, make_attribute_exporter, map_axes
from whet.ops._base import INTS, keep_dims, op


def list_removed_axes(layer):
    """The removed axes."""
    x = layer.inputs[0]
    axes = find_given_axes(layer, x.type.rank)
    if axes is None:
        if any(isinstance(d, Expr) for d in x.shape):
            raise UnsupportedError(f"Squeeze '{layer.name}': the size-1 axes of {x.type} are known only at run time; give the axes")
        return tuple(i for i, d in enumerate(x.shape) if d == 1)
    for a in axes:
        if isinstance(x.shape[a], int) and x.shape[a] != 1:
            raise NetworkError(f"Squeeze '{layer.name}': axis {a} of {x.type} is not 1")
    return axes


def infer(layer):
    x, axes = layer.inputs[0], list_removed_axes(layer)
    return x.type.with_shape(d for i, d in enumerate(x.shape) if i not in axes)


def compute_reference(layer, x, axes=None):
    axes = layer.attrs.get("axes", axes)
    return x.squeeze(None if axes is None else tuple(int(a) for a in np.ravel(axes)))


def list_couples(layer):
    x, axes = layer.inputs[0], list_removed_axes(layer)
    rest = [i for i in range(x.type.rank) if i not in axes]
    return map_axes(x, layer.output, {a: b for b, a in enumerate(rest)})


def recut(layer, kept_indices):
    """Sets the axes explicitly, since an axis pruned to size 1 would be removed too."""
    return {1: np.array(list_removed_axes(layer), np.int64)} if find_given_axes(layer, layer.inputs[0].type.rank) is None else {}


op(
    "Squeeze",
    infer,
    compute_reference,
    attrs={"axes": INTS},
    couples=list_couples,
    zeros=(),
    recut=recut,
    shape_value=keep_dims,
    onnx=lambda node, g: node.add(g, "Squeeze", *convert_attributes_to_inputs(node, g, ["axes"])),
    to_onnx=make_attribute_exporter("axes"),
    samples=[
        (["f32[2,17,1,1]", np.array([2, 3])], {}),
        (["f32[1,3,1,4]", np.array([-2])], {}),
        (["f32[1,3,1,4]"], {}),
        (["extreme f32[13,1]"], {"axes": (1,)}),
        (["i64[1]", np.array([0])], {}),
    ],
)

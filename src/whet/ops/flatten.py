"""Flatten: to a matrix; the axes before `axis` become rows, the others columns."""

from whet.errors import NetworkError
from whet.network import product
from whet.ops._axes import block_couples
from whet.ops._base import keep_dims, op


def split_axis(layer):
    x, axis = layer.inputs[0], layer.attrs["axis"]
    if not -x.type.rank <= axis <= x.type.rank:
        raise NetworkError(f"Flatten '{layer.name}': axis {axis} is out of range for {x.type}")
    return axis + x.type.rank if axis < 0 else axis


def infer(layer):
    x, axis = layer.inputs[0], split_axis(layer)
    return x.type.with_shape((product(x.shape[:axis]), product(x.shape[axis:])))


def compute_reference(layer, x):
    axis = layer.attrs["axis"] + (x.ndim if layer.attrs["axis"] < 0 else 0)
    rows = 1
    for d in x.shape[:axis]:
        rows *= d
    return x.reshape(rows, -1) if x.size else x.reshape(rows, int(product(x.shape[axis:])))


op(
    "Flatten",
    infer,
    compute_reference,
    attrs={"axis": 1},
    zeros=(),
    shape_value=keep_dims,
    couples=lambda layer: block_couples(layer.inputs[0], layer.output),
    inner=lambda layer, level: block_couples(layer.inputs[0], layer.output, level),
    samples=[
        (["f32[2,3,4,5]"], {}),
        (["f32[2,17,1,1]"], {}),
        (["f32[2,3,4]"], {"axis": 2}),
        (["f32[2,3,4]"], {"axis": 0}),
        (["extreme f32[4,5,3]"], {"axis": -1}),
        (["f32[7]"], {}),
    ],
)

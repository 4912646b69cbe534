"""Expand: x broadcast together with the shape of input 1 (or attribute `shape`). A shape that is known only at run time depends on the data."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import make_attribute_exporter
from whet.ops._base import INTS, Couple, find_given_dims, find_known_values, fold_dims, op, replace_given, require_known_ints, to_ints
from whet.ops._data_sized import make_size_symbol
from whet.ops._types import broadcast


def infer(layer):
    x = layer.inputs[0]
    if has_unknown_shape(layer):
        return x.type.with_shape(_find_partial_shape(layer))
    shape = find_given_dims(layer, "shape", 1)
    if shape is None:
        raise NetworkError("needs a shape: input 1, or the attribute shape")
    return x.type.with_shape(broadcast(x.shape, shape))


def has_unknown_shape(layer) -> bool:
    """True if the shape is known only at run time."""
    given = layer.input(1)
    return layer.attrs.get("shape") is None and given is not None and find_known_values(given) is None


def _find_partial_shape(layer):
    """Dims of x that are not 1 stay; the others are symbols. Raises UnsupportedError if the rank is unknown, too."""
    x, given = layer.inputs[0], layer.inputs[1]
    count = given.shape[0] if given.type.rank == 1 else None
    if not isinstance(count, int):
        require_known_ints(layer, 1, "shape")
    rank = max(count, x.type.rank)
    own = (1,) * (rank - x.type.rank) + tuple(x.shape)
    return [d if isinstance(d, int) and d != 1 else make_size_symbol(layer, i) for i, d in enumerate(own)]


def compute_reference(layer, x, shape=None):
    shape = to_ints(layer.attrs.get("shape", shape))
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))


def list_couples(layer):
    """Couples the axes that are not broadcast."""
    x, y = layer.inputs[0], layer.output
    lead = y.type.rank - x.type.rank
    own = [i for i in range(y.type.rank) if i < lead or x.shape[i - lead] == 1]
    return [Couple(x, i - lead, y, i) for i in range(y.type.rank) if i not in own] + [Couple(y, i, y, i) for i in own]


def recut(layer, kept_indices):
    y, shape = layer.output, list(find_given_dims(layer, "shape", 1))
    lead, changed = y.type.rank - len(shape), False
    for (t, axis), at in kept_indices.items():
        if t is y and axis >= lead and shape[axis - lead] != 1:
            shape[axis - lead], changed = len(at), True
    return replace_given(layer, "shape", 1, shape) if changed else {}


op(
    "Expand",
    infer,
    compute_reference,
    attrs={"shape": INTS},
    couples=list_couples,
    zeros=(),
    recut=recut,
    shape_value=lambda layer: [None] if has_unknown_shape(layer) else fold_dims(layer, 1),
    data_sized=has_unknown_shape,
    to_onnx=make_attribute_exporter("shape"),
    samples=[
        (["f32[1,16,1,1]", np.array([1, 16, 5, 7])], {}),
        (["f32[3,1]", np.array([2, 1, 6])], {}),
        (["extreme f32[13]", np.array([1])], {}),
        (["f32[1,1,4]"], {"shape": (2, 3, 4)}),
        (["f32[]", np.array([2, 2])], {}),
        (["bool[1,3]", np.array([2, 1])], {}),
    ],
)

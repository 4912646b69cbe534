"""Concat: concatenation along `axis`."""

import numpy as np

from whet.errors import NetworkError
from whet.network import product
from whet.ops._base import NEEDS_INT, Couple, fold_dims, op
from whet.ops._types import normalize_axis, unify


def infer(layer):
    first = layer.inputs[0]
    axis = normalize_axis(layer.attrs["axis"], first.type.rank)
    shape = list(first.shape)
    for t in layer.inputs[1:]:
        if t.dtype != first.dtype or t.type.rank != first.type.rank:
            raise NetworkError(f"Concat '{layer.name}' takes tensors of one type and rank, not {first.type} and {t.type}")
        for i, d in enumerate(t.shape):
            shape[i] = shape[i] + d if i == axis else unify(shape[i], d, f"Concat '{layer.name}' along axis {axis}: axis {i}")
    return first.type.with_shape(shape)


def list_couples(layer):
    y = layer.output
    axis = normalize_axis(layer.attrs["axis"], y.type.rank)
    result, at = [], 0
    for t in layer.inputs:
        result += [Couple(t, i, y, i) for i in range(y.type.rank) if i != axis]
        n = t.shape[axis]
        if isinstance(n, int) and isinstance(at, int) and n:
            result.append(Couple(t, axis, y, axis, b_at=at, count=n))
        at = at + n
    return result


def shape_value(layer):
    return fold_dims(layer) if product(layer.inputs[0].shape[1:]) == 1 or layer.inputs[0].type.rank == 1 else [None]


op(
    "Concat",
    infer,
    lambda layer, *xs: np.concatenate(xs, axis=layer.attrs["axis"]),
    attrs={"axis": NEEDS_INT},
    couples=list_couples,
    zeros=(),
    shape_value=shape_value,
    samples=[
        (["f32[2,3,4,5]", "f32[2,7,4,5]"], {"axis": 1}),
        (["f32[2,16]", "f32[2,16]", "f32[2,16]"], {"axis": -1}),
        (["f32[2,3]"], {"axis": 0}),
        (["extreme f32[3,5]", "f32[3,4]"], {"axis": 1}),
        (["const f32[1,1,5]", "f32[1,6,5]"], {"axis": 1}),
        (["i64[2]", np.array([-1])], {"axis": 0}),
        (["f16[2,3]", "f16[1,3]"], {"axis": 0}),
    ],
)

"""Transpose: output axis i is input axis perm[i]; without `perm` the axes are reversed."""

from whet.errors import NetworkError
from whet.ops._axes import map_axes
from whet.ops._base import INTS, fold_dims, op


def infer(layer):
    x = layer.inputs[0]
    perm = layer.attrs.setdefault("perm", tuple(reversed(range(x.type.rank))))
    if sorted(perm) != list(range(x.type.rank)):
        raise NetworkError(f"perm {perm} is not a permutation of the {x.type.rank} axes of {x.type}")
    return x.type.with_shape(x.shape[p] for p in perm)


op(
    "Transpose",
    infer,
    lambda layer, x: x.transpose(layer.attrs["perm"]),
    attrs={"perm": INTS},
    couples=lambda layer: map_axes(layer.inputs[0], layer.output, {p: i for i, p in enumerate(layer.attrs["perm"])}),
    zeros=(),
    shape_value=fold_dims,
    samples=[
        (["f32[2,3,4]"], {"perm": (0, 2, 1)}),
        (["f32[2,3,4,5]"], {"perm": (0, 2, 3, 1)}),
        (["extreme f32[5,7]"], {}),
        (["f32[2,3,4,5]"], {"perm": (0, 1, 2, 3)}),
        (["i64[2,3]"], {"perm": (1, 0)}),
    ],
)

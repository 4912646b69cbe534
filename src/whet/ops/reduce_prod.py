"""ReduceProd: the product over axes."""

from whet.network import product
from whet.ops._base import find_known_values
from whet.ops._reduce import register_reduction


def shape_value(layer):
    got = find_known_values(layer.inputs[0])
    return [(product(got),) if got is not None and layer.inputs[0].type.rank == 1 else None]


register_reduction("ReduceProd", lambda x, axes, keep: x.prod(axis=axes, keepdims=keep), shape_value=shape_value)

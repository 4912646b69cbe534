"""ReduceProd: the product over axes."""

from whet.network import product
from whet.ops._base import known_values
from whet.ops._reduce import reduction


def shape_value(layer):
    got = known_values(layer.inputs[0])
    return [(product(got),) if got is not None and layer.inputs[0].type.rank == 1 else None]


reduction("ReduceProd", lambda x, axes, keep: x.prod(axis=axes, keepdims=keep), shape_value=shape_value)

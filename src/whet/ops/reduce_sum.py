"""ReduceSum: the sum over axes."""

from operator import add

from whet.ops._reduce import register_reduction, shape_value_by

register_reduction(
    "ReduceSum", lambda x, axes, keep: x.sum(axis=axes, keepdims=keep), zeros_add_nothing=True, shape_value=shape_value_by(add)
)

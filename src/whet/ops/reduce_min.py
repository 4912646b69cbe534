"""ReduceMin: the minimum over axes; NaN propagates; the highest value for empty axes."""

from whet.network import minimum
from whet.ops._reduce import get_highest_value, register_reduction, shape_value_by

register_reduction(
    "ReduceMin",
    lambda x, axes, keep: x.min(axis=axes, keepdims=keep, **({} if x.size else {"initial": get_highest_value(x.dtype)})),
    logical=True,
    shape_value=shape_value_by(minimum),
)

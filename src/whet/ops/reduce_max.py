"""ReduceMax: the maximum over axes; NaN propagates; the lowest value for empty axes."""

from whet.network import maximum
from whet.ops._reduce import get_lowest_value, register_reduction, shape_value_by

register_reduction(
    "ReduceMax",
    lambda x, axes, keep: x.max(axis=axes, keepdims=keep, **({} if x.size else {"initial": get_lowest_value(x.dtype)})),
    logical=True,
    shape_value=shape_value_by(maximum),
)

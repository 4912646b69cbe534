"""ReduceMax: the maximum over axes; NaN propagates; the lowest value for empty axes."""

from whet.ops._reduce import get_lowest_value, register_reduction

register_reduction(
    "ReduceMax", lambda x, axes, keep: x.max(axis=axes, keepdims=keep, **({} if x.size else {"initial": get_lowest_value(x.dtype)})), logical=True
)

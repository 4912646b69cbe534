"""ReduceMax: the maximum over axes; NaN propagates; the lowest value for empty axes."""

from whet.ops._reduce import lowest_value, reduction

reduction("ReduceMax", lambda x, axes, keep: x.max(axis=axes, keepdims=keep, **({} if x.size else {"initial": lowest_value(x.dtype)})), logical=True)

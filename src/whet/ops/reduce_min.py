"""ReduceMin: the minimum over axes; NaN propagates; the highest value for empty axes."""

from whet.ops._reduce import highest_value, reduction

reduction("ReduceMin", lambda x, axes, keep: x.min(axis=axes, keepdims=keep, **({} if x.size else {"initial": highest_value(x.dtype)})), logical=True)

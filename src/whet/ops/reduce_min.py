"""ReduceMin: the minimum over axes; NaN propagates; the highest value for empty axes."""

from whet.ops._reduce import most, reduction

reduction("ReduceMin", lambda x, axes, keep: x.min(axis=axes, keepdims=keep, **({} if x.size else {"initial": most(x.dtype)})), logical=True)

"""ReduceMin: the smallest value over axes; NaN wins; of nothing the largest there is."""

from whet.ops._reduce import most, reduction

reduction("ReduceMin", lambda x, axes, keep: x.min(axis=axes, keepdims=keep, **({} if x.size else {"initial": most(x.dtype)})), logical=True)

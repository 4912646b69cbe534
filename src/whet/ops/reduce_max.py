"""ReduceMax: the largest value over axes; NaN wins; of nothing the smallest there is."""

from whet.ops._reduce import least, reduction

reduction("ReduceMax", lambda x, axes, keep: x.max(axis=axes, keepdims=keep, **({} if x.size else {"initial": least(x.dtype)})), logical=True)

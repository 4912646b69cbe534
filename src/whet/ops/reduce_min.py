"""ReduceMin: the smallest value over axes; NaN wins."""

from whet.ops._reduce import reduction

reduction("ReduceMin", lambda x, axes, keep: x.min(axis=axes, keepdims=keep))

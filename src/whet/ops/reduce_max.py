"""ReduceMax: the largest value over axes; NaN wins."""

from whet.ops._reduce import reduction

reduction("ReduceMax", lambda x, axes, keep: x.max(axis=axes, keepdims=keep))

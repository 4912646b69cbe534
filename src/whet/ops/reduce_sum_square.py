"""ReduceSumSquare: the sum of squares over axes."""

from whet.ops._reduce import register_reduction

register_reduction("ReduceSumSquare", lambda x, axes, keep: (x * x).sum(axis=axes, keepdims=keep), zeros_add_nothing=True)

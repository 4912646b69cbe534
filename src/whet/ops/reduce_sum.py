"""ReduceSum: the sum over axes."""

from whet.ops._reduce import register_reduction

register_reduction("ReduceSum", lambda x, axes, keep: x.sum(axis=axes, keepdims=keep), zeros_add_nothing=True)

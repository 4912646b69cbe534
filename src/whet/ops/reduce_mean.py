"""ReduceMean: the mean over axes."""

from whet.ops._reduce import reduction

reduction("ReduceMean", lambda x, axes, keep: x.mean(axis=axes, keepdims=keep))

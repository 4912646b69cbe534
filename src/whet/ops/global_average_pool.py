"""GlobalAveragePool: the mean over all spatial axes, kept as 1."""

from whet.ops._global_pool import register_global_pool

register_global_pool("GlobalAveragePool", lambda x, axes: x.mean(axis=axes, keepdims=True))

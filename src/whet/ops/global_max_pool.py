"""GlobalMaxPool: the maximum over all spatial axes, kept as 1."""

from whet.ops._global_pool import register_global_pool

register_global_pool("GlobalMaxPool", lambda x, axes: x.max(axis=axes, keepdims=True))

"""GlobalLpPool: the p-norm over all spatial axes, kept as 1."""

import numpy as np

from whet.ops._global_pool import register_global_pool

register_global_pool("GlobalLpPool", lambda x, axes, p: np.power((np.abs(x) ** p).sum(axis=axes, keepdims=True), x.dtype.type(1 / p)), attrs={"p": 2})

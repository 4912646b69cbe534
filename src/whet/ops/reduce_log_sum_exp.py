"""ReduceLogSumExp: the logarithm of the sum of e^x over axes."""

import numpy as np

from whet.ops._reduce import register_reduction


def log_sum_exp(x, axes, keep):
    """Subtracts the largest finite value first to avoid overflow."""
    x = x if x.dtype.kind == "f" else x.astype(np.float64)
    top = x.max(axis=axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, x.dtype.type(0))
    y = np.log(np.exp(x - top).sum(axis=axes, keepdims=True)) + top
    return y if keep else y.squeeze(axis=axes)


register_reduction("ReduceLogSumExp", log_sum_exp, zeros=None)

"""ReduceL1: the sum of absolute values over axes."""

import numpy as np

from whet.ops._reduce import register_reduction

register_reduction("ReduceL1", lambda x, axes, keep: np.abs(x).sum(axis=axes, keepdims=keep), zeros_add_nothing=True)

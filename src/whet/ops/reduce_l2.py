"""ReduceL2: the square root of the sum of squares over axes."""

import numpy as np

from whet.ops._reduce import register_reduction

register_reduction("ReduceL2", lambda x, axes, keep: np.sqrt((x * x).sum(axis=axes, keepdims=keep)), zeros_add_nothing=True)

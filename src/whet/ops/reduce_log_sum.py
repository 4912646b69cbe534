"""ReduceLogSum: the logarithm of the sum over axes."""

import numpy as np

from whet.ops._reduce import register_reduction

register_reduction("ReduceLogSum", lambda x, axes, keep: np.log(x.sum(axis=axes, keepdims=keep)), zeros_add_nothing=True, zeros=None, positive=True)

"""LogSoftmax: x minus the logarithm of the sum of e^x along `axis`."""

import numpy as np

from whet.ops._softmax import register_softmax_like


def log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    d = x - x.max(axis=axis, keepdims=True)
    return d - np.log(np.exp(d).sum(axis=axis, keepdims=True))


register_softmax_like("LogSoftmax", log_softmax)

"""Softmax: e^x divided by its sum along `axis`."""

import numpy as np

from whet.ops._softmax import register_softmax_like


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    """In x's type; the maximum is subtracted first to avoid overflow."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


register_softmax_like("Softmax", softmax)

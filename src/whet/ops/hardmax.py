"""Hardmax: 1 at the first largest value along `axis`, 0 elsewhere."""

import numpy as np

from whet.ops._softmax import register_softmax_like


def hardmax(x: np.ndarray, axis: int) -> np.ndarray:
    y = np.zeros_like(x)
    np.put_along_axis(y, np.expand_dims(x.argmax(axis=axis), axis), 1, axis)
    return y


register_softmax_like("Hardmax", hardmax)

"""Sums of float8 products as Hopper's tensor cores add them: 14 bits, the rest truncated."""

import numpy as np

_FRACTION = 13  # bits below the leading one of the largest term
_STEP = 32  # products that one instruction adds to the accumulator


def add_float8_products(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [m, k] times w [n, k] transposed, f64 [m, n]; both e4m3."""
    total = np.zeros((len(x), len(w)))
    for at in range(0, x.shape[1], _STEP):
        a, b = (v[:, at : at + _STEP].astype(np.float64) for v in (x, w))
        products = a[:, None] * b[None]
        largest = np.maximum(np.abs(products).max(axis=-1), np.abs(total))
        unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - _FRACTION)
        total = np.trunc(total / unit) * unit + (np.trunc(products / unit[..., None]) * unit[..., None]).sum(axis=-1)
    return total

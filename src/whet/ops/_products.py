"""Matrix products of the references: float32 operands are accumulated in float64 and rounded once.

A BLAS picks its summation order by CPU and by shape, so float32 accumulators would give a reference that differs between machines in the
last bits, and in overflow. In float64 every product of two float32 values is exact, and the order changes nothing that float32 can hold.
"""

from __future__ import annotations

import numpy as np


def accumulator(dtype: np.dtype) -> np.dtype:
    """The dtype that products of `dtype` are accumulated in."""
    return np.dtype(np.float64) if dtype == np.float32 else dtype


def accumulate_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`np.matmul(a, b)` in the accumulator's dtype, not yet rounded."""
    return np.matmul(a.astype(accumulator(a.dtype), copy=False), b.astype(accumulator(b.dtype), copy=False))


def round_accumulator(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Accumulators rounded to `dtype`; an overflow is infinite."""
    with np.errstate(over="ignore"):
        return y.astype(dtype, copy=False)

"""Matrix products of the references: float32 operands are accumulated in float64 and rounded once.

A BLAS picks its summation order by CPU and by shape, so float32 accumulators would give a reference that differs between machines in the
last bits, and in overflow. In float64 every product of two float32 values is exact, and the order changes nothing that float32 can hold.

Where the error of float32 arithmetic itself is wanted (the bound that verification holds an engine to), `native_accumulators` restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_MODE = threading.local()


@contextmanager
def native_accumulators() -> Iterator[None]:
    """In this thread products are accumulated in the operands' own dtype, as kernels do."""
    before = getattr(_MODE, "native", False)
    _MODE.native = True
    try:
        yield
    finally:
        _MODE.native = before


def get_accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that products of `dtype` are accumulated in."""
    return np.dtype(np.float64) if dtype == np.float32 and not getattr(_MODE, "native", False) else dtype


def accumulate_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`np.matmul(a, b)` in the accumulator's dtype, not yet rounded."""
    return np.matmul(a.astype(get_accumulator_dtype(a.dtype), copy=False), b.astype(get_accumulator_dtype(b.dtype), copy=False))


def round_accumulator(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Accumulators rounded to `dtype`; an overflow is infinite."""
    with np.errstate(over="ignore"):
        return y.astype(dtype, copy=False)

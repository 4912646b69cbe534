"""Matrix products of the references: float32 operands are accumulated in float64 and rounded once.

A BLAS picks its summation order by CPU and by shape, so float32 accumulators would give a reference that differs between machines in the
last bits, and in overflow. In float64 every product of two float32 values is exact, and the order changes nothing that float32 can hold.

Where the error of float32 arithmetic itself is wanted (the bound that verification holds an engine to), `native_accumulators` restores it.

Products that would take NumPy long may be computed elsewhere, such as on a GPU: within `products_by`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_MODE = threading.local()


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution, or of a transposed one: `sizes` are those of its results' spatial axes; pads only those before them."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    group: int
    transposed: bool = False


class Products(Protocol):
    """Computes products in place of NumPy. Both methods return sums in `dtype` (float32 or float64), or None: NumPy computes these products."""

    def multiply(self, a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
        """`np.matmul(a, b)`."""

    def convolve(self, x: np.ndarray, w: np.ndarray, window: Window, dtype: np.dtype) -> np.ndarray | None:
        """The convolution of x [N, C, *spatial] with w [K, C / group, *kernel], or the transposed one with w [C, K / group, *kernel], without bias.
        Padding is multiplied as zeros."""


_ELSEWHERE: ContextVar[Products | None] = ContextVar("products", default=None)


@contextmanager
def products_by(products: Products | None) -> Iterator[None]:
    """Products of the references are computed by `products` in this context, and by NumPy where it declines or is None."""
    token = _ELSEWHERE.set(products)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


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
    products, dtype = _ELSEWHERE.get(), get_accumulator_dtype(a.dtype)
    if products is not None and dtype.kind == "f" and (sums := products.multiply(a, b, dtype)) is not None:
        return sums
    return np.matmul(a.astype(get_accumulator_dtype(a.dtype), copy=False), b.astype(get_accumulator_dtype(b.dtype), copy=False))


def convolve_elsewhere(x: np.ndarray, w: np.ndarray, window: Window) -> np.ndarray | None:
    """The convolution by the products of this context, in the accumulator's dtype; None if NumPy has to compute it."""
    products = _ELSEWHERE.get()
    return None if products is None else products.convolve(x, w, window, get_accumulator_dtype(x.dtype))


def round_accumulator(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Accumulators rounded to `dtype`; an overflow is infinite."""
    with np.errstate(over="ignore"):
        return y.astype(dtype, copy=False)

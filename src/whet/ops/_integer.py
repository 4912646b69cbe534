"""Shared by integer products: zero points of the operands, exact i32 accumulation."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError
from whet.network import I8, U8, Layer, Tensor
from whet.ops._types import may_equal


def check_operands(layer: Layer) -> tuple[Tensor, Tensor]:
    """The two operands: 8-bit integers, with zero points of their types. Raises NetworkError."""
    a, b = layer.needs(0), layer.needs(1)
    for t, zero in ((a, layer.input(2)), (b, layer.input(3))):
        if t.dtype not in (I8, U8) or (zero is not None and zero.dtype != t.dtype):
            raise NetworkError(f"{layer.op} '{layer.name}' takes i8 or u8 with zero points of the same type, not {t} and {zero}")
    return a, b


def check_zero(layer: Layer, i: int, size) -> None:
    """Checks that zero point `i` has one value, or `size` values. Raises NetworkError."""
    zero = layer.input(i)
    if zero is not None and zero.shape not in ((), (1,)) and not may_equal(zero.shape, (size,)):
        raise NetworkError(f"{layer.op} '{layer.name}': the zero point {zero} has neither one value nor {size} values")


def subtract_zero_point(x: np.ndarray, zero: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """x minus its zero point (reshaped to broadcast if not scalar) in float64: exact, and usable by BLAS."""
    y = x.astype(np.float64)
    return y if zero is None else y - (zero.reshape(()) if zero.size == 1 else zero.reshape(shape)).astype(np.float64)

"""What integer products share: zero points of the operands, exact sums in i32."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError
from whet.network import I8, U8, Layer, Tensor
from whet.ops._types import may_equal


def check_operands(layer: Layer) -> tuple[Tensor, Tensor]:
    """The two operands: 8-bit integers, with zero points of their types. Raises NetworkError."""
    a, b = layer.inputs[0], layer.inputs[1]
    for t, zero in ((a, layer.input(2)), (b, layer.input(3))):
        if t.dtype not in (I8, U8) or (zero is not None and zero.dtype != t.dtype):
            raise NetworkError(f"{layer.op} '{layer.name}' takes i8 or u8 with zero points of the same type, not {t} and {zero}")
    return a, b  # type: ignore[return-value]


def check_zero(layer: Layer, i: int, size) -> None:
    """Zero point `i` is one number, or one for each of `size`."""
    zero = layer.input(i)
    if zero is not None and zero.shape not in ((), (1,)) and not may_equal(zero.shape, (size,)):
        raise NetworkError(f"{layer.op} '{layer.name}': the zero point {zero} is not one number, nor one for each of {size}")


def centred(x: np.ndarray, zero: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """x less its zero point (shaped to broadcast when it is no scalar), in float64: exact, and BLAS multiplies it."""
    y = x.astype(np.float64)
    return y if zero is None else y - (zero.reshape(()) if zero.size == 1 else zero.reshape(shape)).astype(np.float64)

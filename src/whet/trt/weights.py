"""Weights: arrays of constants as TensorRT names them."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import get_dtype
from whet.runtime.memory import make_array_at
from whet.trt.enums import DataType, from_whet, to_whet


class Weights:
    """An array of constants, or no weights of a type: `Weights(array)`, `Weights(DataType.FLOAT)`, `Weights(type, address, count)`."""

    def __init__(self, a: Any = DataType.FLOAT, ptr: int = 0, count: int = 0):
        if isinstance(a, DataType):
            dtype = to_whet(a).numpy
            self._array = make_array_at(ptr, (count,), dtype) if ptr and count else np.empty(0, dtype)
        else:
            self._array = np.asarray(a)

    @property
    def dtype(self) -> DataType:
        """The element type."""
        return from_whet(get_dtype(self._array))

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._array.size

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._array.nbytes

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._array

    def __len__(self) -> int:
        return self._array.size


def get_array(weights: Any) -> np.ndarray:
    """The array of Weights or of an array."""
    return weights.numpy() if isinstance(weights, Weights) else np.asarray(weights)

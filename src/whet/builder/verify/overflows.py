"""Finite values beyond the range of a storage type: float16 ends at 65504, and larger values are stored as infinity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from whet.network import DType, Tensor


@dataclass(frozen=True)
class Overflow:
    """A tensor of an engine's network with finite values beyond the range of its storage type."""

    layer: str
    tensor: str
    dtype: str
    largest: float
    limit: float

    def __str__(self) -> str:
        return f"%{self.tensor} has values up to {self.largest:.4g}, and {self.dtype} holds at most {self.limit:.5g}"


def round_within_range(a: np.ndarray, dtype: DType) -> np.ndarray:
    """Values rounded to a smaller type, as an array of their own type; finite values beyond the smaller type's range are kept as they are."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = a.astype(dtype.numpy).astype(a.dtype)
    return np.where(np.isinf(rounded) & np.isfinite(a), a, rounded)


def find_overflow(layer: str, t: Tensor, a: np.ndarray, dtype: DType) -> Overflow | None:
    """The overflow of values `a` of a tensor stored as `dtype`, or None. For a result of reformats it names the tensor before them."""
    with np.errstate(over="ignore", under="ignore"):
        lost = np.isinf(a.astype(dtype.numpy)) & np.isfinite(a)
    if not lost.any():
        return None
    while t.maker is not None and t.maker.op == "Reformat":
        t = t.maker.needs(0)
    largest = float(np.abs(a.astype(np.float64)).max(initial=0.0, where=lost))
    return Overflow(layer if t.maker is None else t.maker.name, t.name, dtype.name, largest, float(ml_dtypes.finfo(dtype.numpy).max))


def count_lost_values(got: np.ndarray, *references: np.ndarray) -> int:
    """The number of infinite or NaN values where all references are finite and within the range of `got`'s type."""
    if not (got.dtype.kind == "f" or got.dtype.name == "bfloat16"):
        return 0
    lost, limit = ~np.isfinite(got), float(ml_dtypes.finfo(got.dtype).max)
    for a in references if lost.any() else ():
        lost = lost & (np.abs(np.asarray(a, np.float64)) <= limit)
    return int(lost.sum())


def describe_overflows(overflows: Sequence[Overflow]) -> str:
    """The largest of some overflows and the number of the others; '' without any."""
    if not overflows:
        return ""
    others = len({o.tensor for o in overflows}) - 1
    return f"{max(overflows, key=lambda o: o.largest / o.limit)}" + (f" ({others} more tensors overflow)" if others else "")

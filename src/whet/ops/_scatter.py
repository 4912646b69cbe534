"""Shared by Scatter ops: reductions of updates."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError

REDUCTIONS = ("none", "add", "mul", "max", "min")
_UFUNC = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def check(reduction: str) -> None:
    """Raises NetworkError for an unknown reduction."""
    if reduction not in REDUCTIONS:
        raise NetworkError(f"reduction is one of {', '.join(REDUCTIONS)}, not {reduction!r}")


def combine_at(x: np.ndarray, where, updates: np.ndarray, reduction: str) -> np.ndarray:
    """A copy of x with `updates` combined at `where` by `reduction`."""
    y = x.copy()
    if reduction == "none":
        y[where] = updates
    else:
        _UFUNC[reduction].at(y, where, updates)
    return y

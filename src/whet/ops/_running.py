"""Shared by cumulative sums and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops._base import find_given_ints, to_ints
from whet.ops._types import normalize_axis, require_numeric_input


def get_running_axis(layer: Layer) -> int:
    """The cumulated axis. Raises NetworkError."""
    at = find_given_ints(layer, "axis", 1)
    if at is None or len(at) != 1:
        raise NetworkError(f"{layer.op} '{layer.name}' needs one axis, not {at}")
    return normalize_axis(at[0], layer.needs(0).type.rank)


def infer(layer: Layer) -> TensorType:
    get_running_axis(layer)
    return require_numeric_input(layer)


def make_running_reference(f: Callable[..., np.ndarray], start: int) -> Callable[..., Any]:
    """The reference for np.cumsum or np.cumprod; `start` is the first value of an exclusive op."""

    def compute_reference(layer, x, at=None):
        at = to_ints(layer.attrs.get("axis", at))[0]
        x = np.flip(x, at) if layer.attrs["reverse"] else x
        y = f(x, axis=at, dtype=x.dtype)
        if layer.attrs["exclusive"] and y.shape[at]:
            first = np.full_like(np.take(y, [0], axis=at), start)
            y = np.concatenate([first, np.take(y, range(y.shape[at] - 1), axis=at)], axis=at)
        return np.flip(y, at) if layer.attrs["reverse"] else y

    return compute_reference

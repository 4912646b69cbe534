"""Shared by normalizations with per-channel inputs: type check and coupled axes."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops._base import Couple
from whet.ops._types import may_equal, require_one_float_type


def infer_channels(layer: Layer, least: int = 2) -> TensorType:
    """x's type; inputs from 1 on must have one value per channel."""
    x = layer.needs(0)
    require_one_float_type(layer, *range(1, len(layer.inputs)))
    if x.type.rank < least:
        raise NetworkError(f"{layer.op} '{layer.name}' takes [N, C, ...] of rank {least} or more, not {x.type}")
    for t in layer.required_inputs()[1:]:
        if not may_equal(t.shape, (x.shape[1],)):
            raise NetworkError(f"{layer.op} '{layer.name}': {t} is not one value per channel of {x.type}")
    return x.type


def list_channel_couples(layer: Layer) -> list[Couple]:
    """The batch axis is independent; a channel is pruned from x, all per-channel inputs and y."""
    x, y = layer.needs(0), layer.output
    return [Couple(x, 0, y, 0), Couple(x, 1, y, 1), *(Couple(t, 0, y, 1) for t in layer.required_inputs()[1:])]


def reshape_per_channel(v: np.ndarray, rank: int) -> np.ndarray:
    """v [C] shaped to broadcast over [N, C, ...]."""
    return v.reshape(-1, *(1,) * (rank - 2))

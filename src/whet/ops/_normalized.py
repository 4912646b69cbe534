"""Shared by norms over the last axes: couples of the normalized axes, which change the statistics when cut."""

from __future__ import annotations

from whet.network import Layer
from whet.ops._base import Couple


def list_normalized_couples(layer: Layer, first: int) -> list[Couple]:
    """Couples of the axes from `first` on of input 0 with the output's, and of the parameters (the other inputs) with the output's."""
    x, y = layer.needs(0), layer.output
    rank = x.type.rank
    couples = [Couple(x, i, y, i) for i in range(first, rank)]
    for p in layer.inputs[1:]:
        if p is not None:  # aligned at the last axis, as broadcasting does
            couples += [Couple(p, i, y, i + rank - p.type.rank) for i in range(p.type.rank) if p.shape[i] != 1]
    return couples

"""Shared by If, Loop and Scan: type check of region inputs."""

from __future__ import annotations

from collections.abc import Sequence

from whet.errors import NetworkError
from whet.network import Layer, TensorType


def check_feeds(layer: Layer, region: str, feeds: Sequence[TensorType | None]) -> None:
    """Raises NetworkError if the inputs of a region do not have these types."""
    if region not in layer.regions:
        raise NetworkError(f"has no region '{region}'")
    inner = layer.regions[region].inputs
    if len(inner) != len(feeds):
        raise NetworkError(f"passes {len(feeds)} values to its {region}, which takes {len(inner)}")
    for t, fed in zip(inner, feeds, strict=True):
        if fed is None or t.type != fed:
            raise NetworkError(f"its {region} takes %{t.name} as {t.type}, but is passed {fed}")

"""Shared by If, Loop and Scan: checks of region inputs and of iteration counts."""

from __future__ import annotations

from collections.abc import Sequence

from whet.errors import NetworkError, UnsupportedError
from whet.network import Dim, Layer, TensorType
from whet.ops._base import MAX_REGION_STEPS


def check_steps(layer: Layer, region: str, iterations: Dim | None) -> None:
    """Raises UnsupportedError if the known number of iterations of a body exceeds what one run computes."""
    steps = 1 + len(layer.regions[region].layers)
    if isinstance(iterations, int) and iterations * steps > MAX_REGION_STEPS:
        raise UnsupportedError(
            f"{layer.op} '{layer.name}' runs its body {iterations} times; a loop may run {MAX_REGION_STEPS // steps} times a body of this size"
        )


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

"""Checks that the times of an engine's layers agree with the time of the whole engine."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_LAYER = 1.1  # factor on the whole engine's time: no layer takes longer than the engine; 10 % for the noise of both
LAYERS_TOTAL = 1.5  # factor on the whole engine's time: timed launch by launch, layers of a few microseconds take up to 50 % longer


def find_contradiction(layer_ms: Mapping[str, float], engine_ms: float | None) -> str:
    """A description of how the layers' milliseconds contradict the whole engine's; "" if they agree."""
    if not layer_ms or not engine_ms:
        return ""
    total, longest = sum(layer_ms.values()), max(layer_ms, key=lambda name: layer_ms[name])
    if layer_ms[longest] <= LONGEST_LAYER * engine_ms and total <= LAYERS_TOTAL * engine_ms:
        return ""
    return (
        f"layer times are disturbed: they add up to {total:.4g} ms, {total / engine_ms:.1f} times the {engine_ms:.4g} ms of the whole engine "
        f"(the longest is '{longest}' with {layer_ms[longest]:.4g} ms). They were taken under external load, or launch by launch although launches "
        "overlap: their shares are unreliable"
    )

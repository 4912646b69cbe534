"""Do the times of an engine's layers agree with the time of the whole engine?"""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_LAYER = 1.1  # times the whole engine: no part takes longer than the whole; a tenth for the noise of both
LAYERS_TOTAL = 1.5  # times the whole engine: timed launch by launch, layers of a few microseconds take up to half as long again


def find_contradiction(layer_ms: Mapping[str, float], engine_ms: float | None) -> str:
    """One sentence on how the layers' milliseconds contradict those of the whole engine; "" where they do not."""
    if not layer_ms or not engine_ms:
        return ""
    total, longest = sum(layer_ms.values()), max(layer_ms, key=lambda name: layer_ms[name])
    if layer_ms[longest] <= LONGEST_LAYER * engine_ms and total <= LAYERS_TOTAL * engine_ms:
        return ""
    return (
        f"layer times are disturbed: they add up to {total:.4g} ms, {total / engine_ms:.1f} times the {engine_ms:.4g} ms of the whole engine "
        f"(the longest is '{longest}' with {layer_ms[longest]:.4g} ms). They were taken under external load, or launch by launch where launches "
        "overlap: their shares say little"
    )

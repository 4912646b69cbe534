"""The times of a whole engine's layers, run launch by launch; measured again if they contradict the time of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median

from whet.backends import Load
from whet.engine.time_check import find_contradiction
from whet.measure.compare import compare
from whet.measure.policy import LAYER_PROFILE, PROFILE_ATTEMPTS


def profile_layers(
    run_timed: Callable[[], Sequence[float]],
    names: Sequence[str],
    engine_ms: float,
    watch: Callable[[], AbstractContextManager[Load]] | None = None,
) -> dict[str, float]:
    """Median milliseconds of each layer. `run_timed` runs the engine once and returns the seconds of its layers in the order of `names`.

    Times that contradict the engine's are measured again, up to PROFILE_ATTEMPTS times; if none agrees, those of the least total are returned.
    """
    profiles: list[dict[str, float]] = []
    while len(profiles) < PROFILE_ATTEMPTS:
        runs: list[Sequence[float]] = []

        def run(runs: list[Sequence[float]] = runs) -> float:
            runs.append(run_timed())
            return sum(runs[-1])

        compare([run], LAYER_PROFILE, watch=watch)
        profiles.append({name: 1e3 * median(r[i] for r in runs) for i, name in enumerate(names)})
        if not find_contradiction(profiles[-1], engine_ms):
            return profiles[-1]
    return min(profiles, key=lambda p: sum(p.values()))

"""Comparisons of built engines, kept in the timing cache: a build that makes the same engines again selects the same one and times nothing.

Engines of several thread counts and of several sample modes are compared after each of them is built. A row's key is a digest of all compared
engines (networks, kernels, arenas, profiles, threads), the sources and libraries of their tactics, and the machine. An outdated or forged row is
therefore never looked up, or at worst selects another of the build's own engines, and the selected engine is verified in any case.
whet.measure.engine_history keeps the comparisons within the build of one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whet.backends import Backend, Load
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import plan_digest
from whet.builder.select.whole_engine import sample_load
from whet.engine.plan import EnginePlan
from whet.measure.compare import Ranking
from whet.measure.engine_history import make_keys
from whet.measure.timing_cache import Timed, TimingCache
from whet.tactics import TACTICS

_METHOD = 1  # version of the comparisons; raised when results are no longer comparable
_IDLE, _LOADED = "idle", "under external load"
EARLIER = ", by an earlier build (timing cache)"  # in reports of recalled times


@dataclass(frozen=True)
class PlanTimes:
    """The outcome of a comparison, in seconds, by an engine's index. `recalled`: an earlier build has timed these engines."""

    seconds: list[float]
    spreads: list[float]
    selected: int
    load: Load
    recalled: bool = False

    def find_fastest(self, among: Iterable[int]) -> int:
        """The engine of least time; the first of equal ones."""
        return min(sorted(among), key=self.seconds.__getitem__)


def recall_plans(plans: Sequence[EnginePlan], what: str, config: BuildConfig, backend: Backend) -> PlanTimes | None:
    """The times of an earlier comparison of the same engines for `what`, or None. Those of a comparison under external load are used only under such
    load: times taken now would be no better. Raises CacheError for an unusable cache that the user has named."""
    with _open_cache(config) as cache:
        known = _read(cache, _make_keys(plans, what, _IDLE))
        if known is None and (loaded := _read(cache, _make_keys(plans, what, _LOADED))) is not None and sample_load(backend):
            known = loaded
    return known


def compare_plans(
    plans: Sequence[EnginePlan], order: Sequence[int], what: str, config: BuildConfig, backend: Backend, measure: Callable[[], Ranking]
) -> PlanTimes:  # fmt: skip
    """The times of engines and which is selected: the first of `order` that does not differ from the fastest. Both are those of `recall_plans`, or
    `measure` times the engines and the timing cache keeps the result. Raises CacheError for an unusable cache that the user has named."""
    if (known := recall_plans(plans, what, config, backend)) is not None:
        return known
    ranking, indices = measure(), range(len(plans))
    times = PlanTimes([ranking.seconds(i) for i in indices], [ranking.spread(i) for i in indices], ranking.select(order), ranking.load)
    with _open_cache(config) as cache:
        _write(cache, _make_keys(plans, what, _LOADED if ranking.disturbed else _IDLE), times, what)
    return times


def _open_cache(config: BuildConfig) -> TimingCache:
    return TimingCache(config.timing_cache, lambda _: None, overwrite=config.retime)  # the build of each engine has noted an unusable default cache


def _read(cache: TimingCache, keys: Sequence[tuple[str, str]]) -> PlanTimes | None:
    """The recorded comparison, or None unless the times of all engines and one selected engine are known."""
    found = [(cache.peek(time_key), cache.peek(selected_key)) for time_key, selected_key in keys]
    times = [t for t, _ in found if t is not None]
    selected = [i for i, (_, mark) in enumerate(found) if mark is not None]
    if len(times) < len(keys) or len(selected) != 1:
        return None
    return PlanTimes([t.ms / 1e3 for t in times], [t.spread_ms / 1e3 for t in times], selected[0], Load(), recalled=True)


def _write(cache: TimingCache, keys: Sequence[tuple[str, str]], times: PlanTimes, what: str) -> None:
    with cache.transaction():
        for i, (time_key, selected_key) in enumerate(keys):
            timed = Timed(1e3 * times.seconds[i], 1e3 * times.spreads[i], 1)
            cache.put(time_key, timed, {"what": f"engines compared for {what}"})
            if i == times.selected:
                cache.put(selected_key, timed, {"what": f"engine selected for {what}"})
            else:
                cache.remove(selected_key)


def _make_keys(plans: Sequence[EnginePlan], what: str, state: str) -> list[tuple[str, str]]:
    """The keys of each engine's time and of the mark that it was selected."""
    environment = [_METHOD, [p.machine_key for p in plans]]
    tactics = [TACTICS[choice.tactic] for plan in plans for choice in plan.choices.values()]
    digests = [plan_digest(p) for p in plans]
    kinds = ("time of a built engine", "selected built engine")
    keys = make_keys(tactics, environment, [[kind, what, state, i, digests] for kind in kinds for i in range(len(plans))])
    return list(zip(keys[: len(plans)], keys[len(plans) :], strict=True))

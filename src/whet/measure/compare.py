"""Comparing run times: candidates run in interleaved rounds, slow ones are dropped, drift and external load are accounted for.

Interleaving: each round runs every remaining candidate once, alternately forwards and backwards, so that changes of the machine's speed
(clocks, temperature, external load) affect all candidates alike. Drift correction: samples of a dropped candidate are scaled by the change of
the leader's time since, or a candidate dropped in a fast moment would outrank the remaining ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import hypot, inf
from statistics import median
from time import perf_counter
from typing import Any, Protocol

from whet.backends import Load
from whet.measure.policy import PATIENCE, Policy, Stage
from whet.measure.statistics import compute_confidence_interval, compute_noise, compute_standard_error, estimate_typical_time, lower_quartile, spread

Run = Callable[[], float]


class Timeable(Protocol):
    """An engine that times its own runs."""

    def seconds(self, repeats: int) -> list[float]:
        """The seconds of `repeats` runs."""
        ...


def measure_run(bound: Timeable) -> float:
    """Seconds of one run: comparisons take turns after each."""
    return bound.seconds(1)[0]



@dataclass
class LoadLog:
    """Disturbed measurements of one build: the external load of each."""

    disturbed: list[Load] = field(default_factory=list)

    @property
    def is_patient(self) -> bool:
        """True if disturbed measurements are still repeated."""
        return len(self.disturbed) <= PATIENCE

    def describe(self, consequence: str) -> str:
        """The largest external load and its `consequence` on a busy machine, for people; "" if nothing was disturbed."""
        if not self.disturbed:
            return ""
        worst = max(self.disturbed, key=lambda load: load.others or 0.0)
        took = f"{worst.who} took up to {worst.others:.1f} CPUs while kernels were timed"
        return f"{took}; those measurements were repeated, but on a busy machine {consequence}"


@dataclass(frozen=True)
class Ranking:
    """The outcome of `compare`, in seconds, by a candidate's index.

    `samples`: one per round, drift-corrected; empty for candidates that failed. `runs`: every counted run as measured. `survivors` were not
    dropped. `load` is the external CPU load; its `others` is None if it is not measured.
    """

    policy: Policy
    samples: list[list[float]]
    runs: list[list[float]]
    survivors: list[int]
    failures: dict[int, Exception] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    attempts: int = 1

    @property
    def disturbed(self) -> bool:
        return self.load.disturbed

    def seconds(self, i: int) -> float:
        """The typical time of a candidate."""
        return estimate_typical_time(self.samples[i], self.disturbed)

    def spread(self, i: int) -> float:
        """Half the interquartile range of a candidate's samples."""
        return spread(self.samples[i])

    def interval(self, i: int) -> tuple[float, float]:
        """The 95 % confidence interval of a candidate's median."""
        return compute_confidence_interval(self.samples[i])

    def fastest(self, among: Iterable[int] | None = None) -> int:
        """The candidate of least time; the first of equal ones."""
        return min(sorted(range(len(self.samples)) if among is None else among), key=self.seconds)

    def differs(self, i: int, fastest: int, errors: float | None = None) -> bool:
        """True if a candidate is slower than `fastest` by more than the policy's tolerance. `errors` replaces the policy's standard errors."""
        errors = self.policy.accept_errors if errors is None else errors
        a, b = self.samples[i], self.samples[fastest]
        noise = compute_noise(a, b, self.policy.paired) if errors is None else errors * hypot(compute_standard_error(a), compute_standard_error(b))
        return self.seconds(i) - self.seconds(fastest) > self.policy.tolerance(self.seconds(fastest), noise)

    def select(self, order: Sequence[int]) -> int:
        """The first candidate of `order` that does not differ from the fastest of them."""
        fastest = self.fastest(order)
        return next(i for i in order if not self.differs(i, fastest))

    def ratios(self, i: int, to: int = 0) -> list[float]:
        """A candidate's time relative to another's, round by round: external load that slows both cancels."""
        return [a / b for a, b in zip(self.samples[i], self.samples[to], strict=False)]


def compare(
    runs: Sequence[Run],
    policy: Policy,
    *,
    run_in_order: Callable[[Sequence[int]], Sequence[float]] | None = None,
    watch: Callable[[], AbstractContextManager[Load]] | None = None,
    loads: LoadLog | None = None,
    catch: tuple[type[Exception], ...] = (),
) -> Ranking:
    """Times `runs`, each of which runs a candidate once and returns its seconds.

    `run_in_order` times the candidates of these indices back to back instead, after the warm-up. `watch` measures external load (a backend's
    `watch`); disturbed attempts are repeated as the policy says, as long as `loads` is patient. A candidate that raises one of `catch` in its
    warm-up is left out.
    """
    failures: dict[int, Exception] = {}
    candidates = list(range(len(runs)))
    kept: list[_Attempt] = []
    count = 0
    with _disable_garbage_collection():
        while True:
            with nullcontext(Load()) if watch is None else watch() as load:
                attempt = _Attempt(runs, policy, run_in_order, catch, failures)
                attempt.measure(candidates)
            attempt.load, count = load, count + 1
            disturbed = load.disturbed
            if policy.pool:
                kept = [*kept, attempt] if disturbed else [attempt.add_missing_from(kept, candidates)]
            else:
                kept = [min([*kept, attempt], key=lambda a: a.others)]
            if disturbed and loads is not None:
                loads.disturbed.append(load)
            if not disturbed or count >= policy.attempts or (loads is not None and not loads.is_patient):
                break
            least = {i: min(s for a in kept for s in a.samples[i]) for i in candidates if i not in failures}
            candidates = [i for i, s in least.items() if not _is_hopeless(policy, s, min(least.values()))]
    indices = range(len(runs))
    samples = [[s for a in kept for s in a.samples[i]] for i in indices]
    return Ranking(policy, samples, [[s for a in kept for s in a.runs[i]] for i in indices], kept[-1].alive, failures, kept[-1].load, count)


def time_calls(call: Callable[[], Any]) -> Run:
    """A run for `compare` by the host's clock."""

    def run() -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    return run


class _Attempt:
    """One pass of a comparison."""

    def __init__(self, runs: Sequence[Run], policy: Policy, run_in_order: Any, catch: tuple[type[Exception], ...], failures: dict[int, Exception]):
        self._runs, self.policy, self._run_in_order, self._catch, self._failures = runs, policy, run_in_order, catch, failures
        self.samples: list[list[float]] = [[] for _ in runs]
        self.runs: list[list[float]] = [[] for _ in runs]
        self.alive: list[int] = []
        self.load = Load()
        self._warmup: dict[int, float] = {}
        self._counts = [1] * len(runs)
        self._leader_then: dict[int, float] = {}  # by dropped candidate

    @property
    def others(self) -> float:
        """CPUs used by other processes."""
        return self.load.others or 0.0

    def add_missing_from(self, earlier: Sequence[_Attempt], measured: Sequence[int]) -> _Attempt:
        """Adds the samples of candidates that only earlier attempts have measured; returns this attempt."""
        for i in range(len(self.samples)):
            if i not in measured:
                self.samples[i] = [s for a in earlier for s in a.samples[i]]
                self.runs[i] = [s for a in earlier for s in a.runs[i]]
        return self

    def measure(self, candidates: Sequence[int]) -> None:
        """Warms up and runs all stages."""
        self._warm_up(candidates)
        for stage in self.policy.stages:
            self._run_stage(stage)
        end = self._find_least_time()
        for i, leader in self._leader_then.items():
            if leader > 0:  # a backend that runs nothing reports no time
                self.samples[i] = [s * end / leader for s in self.samples[i]]

    def _warm_up(self, candidates: Sequence[int]) -> None:
        for _ in range(self.policy.warmup_rounds):
            for i in candidates:
                if i in self._failures:
                    continue
                try:
                    self._warmup[i] = self._runs[i]()
                except self._catch as error:
                    self._failures[i] = error
                    self._warmup.pop(i, None)
        self.alive = [i for i in candidates if i not in self._failures]
        fastest = min(self._warmup.values(), default=0.0)
        if self.policy.long is not None and fastest >= self.policy.long_seconds:
            self.policy = self.policy.long
        p = self.policy
        if not p.warmup_rounds:
            return
        for i, s in self._warmup.items():
            self._counts[i] = max(1, int(min(p.block.most, p.block.seconds / max(s, 1e-7))))
            if s > p.drop_after_warmup * fastest or _is_hopeless(p, s, fastest):
                self.samples[i], self.runs[i] = [s], [s]
        self.alive = [i for i in self.alive if not self.samples[i]]

    def _run_stage(self, stage: Stage) -> None:
        if not stage.until_decided:
            self._run_rounds(stage)
        for _ in range(stage.until_decided):
            if len(self.alive) > 1:
                self._run_rounds(stage)
            if self._is_decided():
                break
        if stage.drop_at_end < inf:
            leader = self._find_least_time()
            self._drop([i for i in self.alive if median(self.samples[i]) > stage.drop_at_end * leader], leader)

    def _run_rounds(self, stage: Stage) -> None:
        fewest, limit, done = stage.rounds[0], self._round_limit(stage), 0
        while self.alive and done < limit:
            if stage.budget.per == "fastest" and done >= fewest and done * self._find_least_time() >= stage.budget.seconds:
                break
            self._run_round(self.alive[:: 1 if done % 2 == 0 else -1])
            if stage.drop:
                leader, factor = self._find_least_time(), stage.drop[min(done, len(stage.drop) - 1)]
                self._drop([i for i in self.alive if self._is_behind(i, factor * leader)], leader)
            done += 1
            if done == 1 and not self.policy.warmup_rounds:
                limit = self._round_limit(stage)

    def _round_limit(self, stage: Stage) -> int:
        """The number of rounds within a stage's budget, estimated from the remaining candidates' times so far."""
        fewest, most = stage.rounds
        once = sum(self._expect(i) for i in self.alive)
        if once > 0 and stage.budget.per != "fastest":
            granted = stage.budget.seconds * (len(self.alive) if stage.budget.per == "candidate" else 1)
            most = min(most, int(min(granted / once, most)))
        return max(fewest, most)

    def _expect(self, i: int) -> float:
        """The expected seconds of a candidate's next block."""
        once = median(self.samples[i]) if self.samples[i] else self._warmup.get(i, 0.0)
        return once * (self._counts[i] + self.policy.block.discard)

    def _run_round(self, order: Sequence[int]) -> None:
        if self._run_in_order is not None:
            blocks = [[s] for s in self._run_in_order(order)]
        else:
            discard = self.policy.block.discard
            blocks = [[self._runs[i]() for _ in range(discard + self._counts[i])][discard:] for i in order]
        for i, block in zip(order, blocks, strict=True):
            self.samples[i].append(median(block))
            self.runs[i] += block

    def _find_least_time(self) -> float:
        return min((median(self.samples[i]) for i in self.alive if self.samples[i]), default=0.0)

    def _is_behind(self, i: int, seconds: float) -> bool:
        return lower_quartile(self.samples[i]) > seconds and sum(self.runs[i]) >= self.policy.drop_after_seconds

    def _drop(self, candidates: Sequence[int], leader: float) -> None:
        dropped = [i for i in candidates if not (self.policy.keep_incumbent and i == 0)]
        self._leader_then |= dict.fromkeys(dropped, leader)
        self.alive = [i for i in self.alive if i not in dropped]

    def _is_decided(self) -> bool:
        """True if the incumbent leads, or another candidate is faster by a significant difference."""
        now = Ranking(self.policy, self.samples, self.runs, self.alive)
        fastest, incumbent = now.fastest(self.alive), min(self.alive)
        return fastest == incumbent or now.differs(incumbent, fastest, self.policy.decide_errors)


def _is_hopeless(policy: Policy, seconds: float, fastest: float) -> bool:
    """True if a candidate's run is longer than any disturbance explains."""
    factor, least = policy.hopeless
    return seconds > max(least, factor * fastest)


@contextmanager
def _disable_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: its milliseconds would be attributed to the candidate that is running."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

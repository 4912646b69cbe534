"""A whole engine that competes in the selection: its origin, its plan, its binding to memory and its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np

from whet.builder.select.formats import Assignment
from whet.builder.select.search import Search
from whet.engine.plan import EnginePlan
from whet.errors import BackendError, BuildError
from whet.measure.compare import compare, measure_run
from whet.measure.option import Option
from whet.measure.policy import ENGINES
from whet.measure.statistics import compute_noise, estimate_typical_time, spread
from whet.measure.timing_cache import Timed
from whet.network import Network
from whet.runtime import BoundEngine, WeightStore, bind

Make = Callable[[Network, Mapping[str, Option]], EnginePlan]


class BrokenKernel(BuildError):
    """A kernel failed at run time; the build continues without it."""

    def __init__(self, layer: str, option: Option, why: str):
        super().__init__(f"'{layer}' by {option.tactic.name} {option.kernel.implementation} fails at run time: {why}")
        self.layer, self.option = layer, option


@dataclass
class EngineCandidate:
    """A whole engine. `what` describes its origin, `lowered` is its network with the layers in `unfused` unfused, `net` that network with
    reformats, `chosen` the option per layer.

    `samples` are times in ms of this build; without them `recalled_time` is that of an earlier one (timing cache). `drift` is the drift factor:
    how much slower the machine has become since, by another candidate that was timed at both moments. `ms` and `spread` include it."""

    what: str
    assignment: Assignment
    lowered: Network
    unfused: list[tuple[str, str]]
    net: Network
    chosen: dict[str, Option]
    plan: EnginePlan
    bound: BoundEngine | None = None
    samples: list[float] = field(default_factory=list)
    disturbed: bool = False
    recalled_time: Timed | None = None
    drift: float = 1.0

    @property
    def ms(self) -> float:
        if self.samples:
            return estimate_typical_time(self.samples, self.disturbed) * self.drift
        return inf if self.recalled_time is None else self.recalled_time.ms * self.drift

    @property
    def spread(self) -> float:
        if not self.samples:
            return 0.0 if self.recalled_time is None else self.recalled_time.spread_ms * self.drift
        return spread(self.samples) * self.drift

    def noise(self, other: EngineCandidate) -> float:
        """The difference in ms up to which this and another candidate count as equal: the larger spread of both; for candidates timed in the
        same rounds at most the spread of their differences, from which drift cancels."""
        if self.samples and len(self.samples) == len(other.samples):
            return min(max(self.spread, other.spread), compute_noise(self.samples, other.samples) * self.drift)
        return max(self.spread, other.spread)


class BenchmarkHarness:
    """Runs and times engines on the same inputs, with one shared copy of every weight."""

    def __init__(self, search: Search, inputs: Mapping[str, np.ndarray]):
        self.search, self.inputs = search, inputs
        self.store = WeightStore(search.backend)

    def bind(self, e: EngineCandidate) -> BoundEngine:
        """The candidate bound to memory; the first call binds it and runs it once. Raises BrokenKernel if one of its kernels fails."""
        if e.bound is not None:
            return e.bound
        self.search.log.step(e.what)
        bound = bind(e.plan, self.search.backend, store=self.store)
        bound.feed(self.inputs)
        try:
            bound.run()
        except BackendError as error:
            layer = find_failing_layer(bound)
            if layer is None:
                raise
            raise BrokenKernel(layer, e.chosen[layer], str(error)) from error
        e.bound = bound
        return bound

    def measure(self, candidates: Sequence[EngineCandidate]) -> None:
        """Times the candidates interleaved and sets their samples. Raises BrokenKernel if one of their kernels fails."""
        assert self.search.timer is not None
        bounds = [self.bind(e) for e in candidates]
        ranking = compare([partial(measure_run, b) for b in bounds], ENGINES, watch=self.search.backend.watch, loads=self.search.timer.loads)
        for e, samples in zip(candidates, ranking.samples, strict=True):
            e.samples, e.disturbed, e.drift = [s * 1e3 for s in samples], ranking.disturbed, 1.0


def select_earliest(candidates: Sequence[EngineCandidate]) -> EngineCandidate:
    """The first candidate that is not slower than the fastest by more than the noise."""
    best = min(candidates, key=lambda e: e.ms)
    return next(e for e in candidates if e.ms - best.ms <= ENGINES.tolerance(best.ms, e.noise(best)))


def find_failing_layer(bound: BoundEngine) -> str | None:
    """The first layer with a failing kernel if the layers run one by one; None if none fails."""
    done = 0
    try:
        for _ in bound.walk():
            done += 1
    except BackendError:
        return bound.network.layers[done].name
    return None


def replace_kernels(base: EngineCandidate, title: str, others: Mapping[str, Option], make: Make) -> EngineCandidate:
    """`base` with other options of the same signatures for some layers."""
    chosen = {**base.chosen, **others}
    return EngineCandidate(title, base.assignment, base.lowered, base.unfused, base.net, chosen, make(base.net, chosen))

"""One whole engine among those that are tried: how it came about, its plan, the engine over memory, its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from whet.builder.select.formats import Choosing
from whet.builder.select.search import Search
from whet.engine.plan import EnginePlan
from whet.errors import BackendError, BuildError
from whet.measure.option import Option
from whet.measure.statistics import noise_between, spread, typical
from whet.measure.timing_cache import Timed
from whet.network import Network
from whet.runtime import BoundEngine, WeightStore, bind

Make = Callable[[Network, Mapping[str, Option]], EnginePlan]


class BrokenKernel(BuildError):
    """A kernel failed when it ran; building goes on without it."""

    def __init__(self, layer: str, option: Option, why: str):
        super().__init__(f"'{layer}' by {option.tactic.name} {option.kernel.implementation} fails at run time: {why}")
        self.layer, self.option = layer, option


@dataclass
class Entry:
    """One whole engine: how it came about, the network chosen for (and what was taken apart for it), that network with reformats, the
    option per layer, its plan and times in ms: samples of this build, else what an earlier one `told`, times `pace` (how much slower the
    machine is since then, by another entry that was timed in both moments)."""

    what: str
    choosing: Choosing
    lowered: Network
    unfused: list[tuple[str, str]]
    net: Network
    chosen: dict[str, Option]
    plan: EnginePlan
    bound: BoundEngine | None = None
    samples: list[float] = field(default_factory=list)
    disturbed: bool = False
    told: Timed | None = None
    pace: float = 1.0

    @property
    def ms(self) -> float:
        if self.samples:
            return typical(self.samples, self.disturbed) * self.pace
        return inf if self.told is None else self.told.ms * self.pace

    @property
    def spread(self) -> float:
        if not self.samples:
            return 0.0 if self.told is None else self.told.spread_ms * self.pace
        return spread(self.samples) * self.pace

    def noise(self, other: Entry) -> float:
        """By how many ms this and another may differ and count as equal: what the middle of their times varies by, or of their differences
        where they ran in the same turns, in which a change of the machine's pace does not count."""
        if self.samples and len(self.samples) == len(other.samples):
            return min(max(self.spread, other.spread), noise_between(self.samples, other.samples) * self.pace)
        return max(self.spread, other.spread)


class Stand:
    """Where engines are run: the same inputs for all of them, and one copy of every weight."""

    def __init__(self, search: Search, inputs: Mapping[str, np.ndarray]):
        self.search, self.inputs = search, inputs
        self.store = WeightStore(search.backend)

    def bound(self, e: Entry) -> BoundEngine:
        """The engine over memory; made, and run once, when it is asked for first. Raises BrokenKernel when one of its kernels fails."""
        if e.bound is not None:
            return e.bound
        self.search.tell.step(e.what)
        bound = bind(e.plan, self.search.backend, store=self.store)
        bound.feed(self.inputs)
        try:
            bound.run()
        except BackendError as error:
            layer = first_broken(bound)
            if layer is None:
                raise
            raise BrokenKernel(layer, e.chosen[layer], str(error)) from error
        e.bound = bound
        return bound


def first_broken(bound: BoundEngine) -> str | None:
    """The first layer whose kernel fails when the layers run one by one."""
    done = 0
    try:
        for _ in bound.walk():
            done += 1
    except BackendError:
        return bound.network.layers[done].name
    return None


def changed_entry(base: Entry, what: str, others: Mapping[str, Option], make: Make) -> Entry:
    """`base` with other kernels of the same operands for some layers."""
    chosen = {**base.chosen, **others}
    return Entry(what, base.choosing, base.lowered, base.unfused, base.net, chosen, make(base.net, chosen))

"""One whole engine among those that are tried: how it came about, its plan, the engine over memory, its times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from whet.builder.candidates import Option
from whet.builder.choice import Choosing
from whet.builder.search import Search
from whet.builder.timing import typical
from whet.engine.plan import EnginePlan
from whet.errors import BackendError, BuildError
from whet.network import Network
from whet.runtime import Bound, WeightStore, bind

Make = Callable[[Network, Mapping[str, Option]], EnginePlan]


class BrokenKernel(BuildError):
    """A kernel failed when it ran; building goes on without it."""

    def __init__(self, layer: str, option: Option, why: str):
        super().__init__(f"'{layer}' by {option.tactic.name} {option.kernel.implementation} fails at run time: {why}")
        self.layer, self.option = layer, option


@dataclass
class Entry:
    """One whole engine: how it came about, the network chosen for (and what was taken apart for it), that network with reformats, the
    option per layer, its plan and times in ms."""

    what: str
    choosing: Choosing
    lowered: Network
    unfused: list[tuple[str, str]]
    net: Network
    chosen: dict[str, Option]
    plan: EnginePlan
    bound: Bound | None = None
    samples: list[float] = field(default_factory=list)
    disturbed: bool = False

    @property
    def ms(self) -> float:
        return typical(self.samples, self.disturbed) if self.samples else inf

    @property
    def spread(self) -> float:
        s = sorted(self.samples)
        return (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2 if s else 0.0


def bound_entry(search: Search, e: Entry, inputs: Mapping[str, np.ndarray], store: WeightStore) -> Bound:
    """The engine over memory, run once. Raises BrokenKernel when one of its kernels fails."""
    bound = bind(e.plan, search.machine, store=store)
    bound.feed(inputs)
    try:
        bound.run()
    except BackendError as error:
        layer = first_broken(bound)
        if layer is None:
            raise
        raise BrokenKernel(layer, e.chosen[layer], str(error)) from error
    return bound


def first_broken(bound: Bound) -> str | None:
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

"""Selecting kernels in the network on backends with overlapping launches: the whole network is replayed with one kind of layer exchanged.

A kernel timed in a chain of its own kind does not show its effect on adjacent launches: the shared memory it leaves to the next one for
prefetched weights, the end of its last block, the contents of the cache. So options that are nearly as fast as the selected one are compared in
the network itself, kind by kind, the most expensive kinds first. The fastest stays in the network for the next kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from whet.errors import BackendError, BuildError, EngineError
from whet.measure.compare import compare
from whet.measure.option import Option
from whet.measure.policy import IN_NETWORK, IN_NETWORK_AGAIN, IN_NETWORK_NEAR
from whet.runtime import BoundEngine, WeightStore
from whet.runtime.kernels import plan_layer

_SWEEPS = 3  # over all kinds: a changed kernel affects the adjacent ones


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers that do equal work with one option, and other options that may replace it in all of them. `text` describes the work."""

    text: str
    layers: tuple[str, ...]
    incumbent: Option
    others: tuple[Option, ...]


@dataclass(frozen=True)
class Selection:
    """The option selected for a kind, and the network's milliseconds with it at that moment (infinite if there was no time to compare)."""

    kind: LayerKind
    option: Option
    ms: float


def select_in_network(bound: BoundEngine, kinds: Sequence[LayerKind], store: WeightStore, seconds: float) -> list[Selection]:
    """The options with which the whole network is fastest, one for each kind. Takes about `seconds`."""
    network, end = ExchangeableNetwork(bound, store), perf_counter() + seconds
    selected = {kind: Selection(kind, kind.incumbent, inf) for kind in kinds}
    order = sorted(kinds, key=lambda kind: -kind.incumbent.cost * len(kind.layers))
    near: dict[LayerKind, Sequence[Option]] = {kind: kind.others for kind in kinds}
    changes, changes_then = 0, dict.fromkeys(kinds, -1)  # changes so far, and when each kind was last compared
    for _ in range(_SWEEPS):
        for kind in order:
            if perf_counter() > end:
                break
            if changes_then[kind] == changes:
                continue
            before = selected[kind].option
            selected[kind], near[kind] = network.select(kind, selected[kind], near[kind], again=changes_then[kind] >= 0)
            changes += selected[kind].option is not before
            changes_then[kind] = changes
    return list(selected.values())


class ExchangeableNetwork:
    """The launches of a bound engine, some of them exchanged for those of other kernels with the same operands."""

    def __init__(self, bound: BoundEngine, store: WeightStore):
        self.bound, self.store = bound, store
        self.calls = [list(calls) for calls in bound.step_calls]
        self._steps = {step.layer.name: i for i, step in enumerate(bound.shaped.steps)}
        self._recorded: dict[tuple[int, Any], list[Any] | None] = {}
        self._weights: list[Any] = []  # packed weights of exchanged kernels

    def select(self, kind: LayerKind, current: Selection, others: Sequence[Option], *, again: bool = False) -> tuple[Selection, list[Option]]:
        """Compares the present option of a kind with others in the network as it is; the fastest stays in it. Returns it and the options
        within IN_NETWORK_NEAR of it. `again`: `others` come from an earlier sweep."""
        options: list[Option] = []
        executables: list[Any] = []
        for option in (current.option, *(o for o in others if o is not current.option)):
            calls = {self._steps[name]: self._record(name, option) for name in kind.layers}
            recorded = {step: c for step, c in calls.items() if c is not None}
            if len(recorded) == len(calls):
                options.append(option)
                executables.append(self._finish(recorded))
        if len(options) < 2:
            return current, []
        ranking = compare(
            [partial(_run_untimed, e) for e in executables],  # the first run instantiates the graph
            IN_NETWORK_AGAIN if again else IN_NETWORK,
            run_in_order=lambda order: self.bound.backend.seconds_in_row([executables[i] for i in order]),
            catch=(BackendError,),
        )
        measured = [i for i, samples in enumerate(ranking.samples) if samples]
        if not measured or options[measured[0]] is not current.option:
            return current, []
        fastest = ranking.fastest(ranking.survivors)
        winner = ranking.select([0, fastest])
        near = [options[i] for i in measured if ranking.seconds(i) <= IN_NETWORK_NEAR * ranking.seconds(fastest)]
        for name in kind.layers:
            self.calls[self._steps[name]] = self._record(name, options[winner]) or self.calls[self._steps[name]]
        return Selection(kind, options[winner], ranking.seconds(winner) * 1e3), near

    def _finish(self, exchanged: Mapping[int, list[Any]]) -> Any:
        """An executable of the network with the launches of some steps exchanged."""
        stream = self.bound.backend.stream()
        for i, calls in enumerate(self.calls):
            for call in exchanged.get(i, calls):
                stream.record(call)
        return stream.finish()

    def _record(self, name: str, option: Option) -> list[Any] | None:
        """The launches of an option for a layer; None if it cannot be planned."""
        i = self._steps[name]
        if (i, option.ident) not in self._recorded:
            try:
                step = plan_layer(self.bound.shaped.steps[i].layer, option.choice(), self.bound.backend)
                if step.fell_back:
                    raise BackendError(step.fell_back)
                packed = [self.store.packed(p) for p in step.kernel.packed]
                self._weights += packed
                self._recorded[i, option.ident] = self.bound.record_kernel(i, step.kernel, [p.address for p in packed])
            except (BackendError, BuildError, EngineError):
                self._recorded[i, option.ident] = None
        return self._recorded[i, option.ident]


def _run_untimed(executable: Any) -> float:
    executable.run()
    return 0.0

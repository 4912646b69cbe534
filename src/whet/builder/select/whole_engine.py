"""Selecting whole engines: a few different ones are built and timed end to end, since a sum of layer times is not the time of the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whet.backends import Backend
from whet.builder.candidates.filter import stores_float16
from whet.builder.candidates.reformats import with_reformats
from whet.builder.candidates.views import ViewClashError, resolve_clashes
from whet.builder.select.engine_candidate import BenchmarkHarness, BrokenKernel, EngineCandidate, Make, select_earliest
from whet.builder.select.formats import Assignment, ReformatCost, choose_formats, compute_total_time, list_links
from whet.builder.select.fusion import time_unfused, unfuse_slower
from whet.builder.select.refine import refine_in_network
from whet.builder.select.search import SUM_MARGIN, Search
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.report import EngineTime, SelectionRecord
from whet.measure.layer_profile import profile_layers
from whet.measure.option import Option
from whet.measure.policy import ENGINE_NEAR
from whet.network import Network, Tensor
from whet.tactics import Operand

_LOAD_SAMPLE_S = 0.2  # /proc counts in ticks of 10 ms
WIDE = "no 16-bit floats"  # the layers' times select types; this variant lets the whole engine's time decide


@dataclass
class SelectedEngine:
    """The selected engine, and the times of all that were compared."""

    candidate: EngineCandidate
    engines: list[EngineTime]
    estimate_ms: float
    recalled: bool = False  # selected by times from the timing cache

    @property
    def plan(self) -> EnginePlan:
        return self.candidate.plan

    @property
    def chosen(self) -> dict[str, Option]:
        return self.candidate.chosen

    def make_selection_record(self) -> SelectionRecord:
        c = self.candidate.assignment
        load = " under external load" if self.candidate.disturbed else ""
        timed = f"by an earlier build{load} (timing cache)" if self.recalled else ""
        return SelectionRecord(c.method, self.estimate_ms, self.candidate.what, timed, len(c.core), dict(c.tried) if c.core else {})


def select_engine(search: Search, make: Make) -> SelectedEngine:
    """Builds different engines, times them interleaved and selects the fastest, or the first of those that do not differ.

    If the timing cache has their times, the engine of the earlier build is selected and nothing is timed, unless the times of a layer contradict
    that of the engine."""
    search.log.stage("choice", 1)
    candidates = _list_engines(search, make)
    timed = search.timer is not None and search.backend.capabilities.executes and search.config.whole_engines > 0
    if not timed:
        first = candidates[0]
        return SelectedEngine(first, [], first.assignment.cost)
    harness = BenchmarkHarness(search, probe_inputs(candidates[0].plan.network, search.config.seed, probe_shapes(candidates[0].plan)))
    best = time_and_select(search, make, harness, list(candidates))
    if search.retime_contradictions(best.candidate.lowered, best.chosen, best.candidate.ms):
        time_unfused(search)
        best = time_and_select(search, make, harness, _list_engines(search, make))
    return best


def time_and_select(search: Search, make: Make, harness: BenchmarkHarness, candidates: list[EngineCandidate]) -> SelectedEngine:
    """The fastest of these and of one with kernels selected in the network. Times and the selection are read from the timing cache if it has them."""
    # one step for each engine that is not bound yet, the engine of runners-up, the refined engine, and the final run
    search.log.stage("whole engines", sum(e.bound is None for e in candidates) + 3)
    _set_times(search, candidates, harness)
    if search.config.optimization_level >= 3 and search.config.in_network and not search.cannot_win(candidates[0].assignment.cost):
        search.log.phase("choice in the network")
        refined = refine_in_network(search, min(candidates, key=lambda e: e.ms), make, harness)
        search.log.phase("whole engines")
        if refined is not None:
            overlaps, leader = search.backend.capabilities.overlapping_launches, min(candidates, key=lambda e: e.ms)
            leader_ms = leader.ms
            candidates.append(refined)
            retimed = candidates if overlaps else [e for e in candidates if e is refined or e.ms <= ENGINE_NEAR * leader_ms]
            _set_times(search, retimed, harness)
            for e in candidates:
                e.drift = 1.0 if e in retimed else leader.ms / leader_ms  # candidates that were not re-timed are scaled by the drift factor
            if overlaps and refined.ms <= min(e.ms for e in candidates):
                candidates.insert(0, candidates.pop())  # preferred even within the noise: each of its changes was faster in the network
    recalled = not any(e.samples for e in candidates)
    selected = (search.history.read_selected(candidates) if recalled else None) or select_earliest(candidates)
    layer_ms = search.history.read_layer_times(selected) if recalled else None
    if layer_ms is None:
        search.log.step("in place")
        bound = harness.bind(selected)
        layer_ms = profile_layers(bound.run_timed, [layer.name for layer in selected.net.layers], selected.ms, search.backend.watch)
        search.history.write_layer_times(selected, layer_ms)
    if not recalled:
        search.history.write_selected(candidates, selected)
    selected.plan.report.latency_ms, selected.plan.report.layer_ms = selected.ms, layer_ms
    engines = [EngineTime(e.what, e.ms, e.spread) for e in (selected, *(e for e in candidates if e is not selected))]
    return SelectedEngine(selected, engines, selected.assignment.cost, recalled)


def _set_times(search: Search, candidates: list[EngineCandidate], harness: BenchmarkHarness) -> None:
    """Sets the times of all candidates: from the timing cache if it has them all for this set of engines, else measured. Times that were measured
    under external load are used while there is such load: times taken now would be no better."""
    known, disturbed = search.history.read_times(candidates), False
    if known is None and (loaded := search.history.read_times(candidates, disturbed=True)) is not None and sample_load(search.backend):
        known, disturbed = loaded, True
    for k, e in enumerate(candidates):
        e.samples, e.recalled_time, e.drift, e.disturbed = [], None if known is None else known[k], 1.0, disturbed
    if known is None:
        harness.measure(candidates)
        search.history.write_times(candidates)


def sample_load(backend: Backend) -> bool:
    """True if the machine is under external load at this moment."""
    with backend.watch() as load:
        time.sleep(_LOAD_SAMPLE_S)
    return load.disturbed


def _list_engines(search: Search, make: Make) -> list[EngineCandidate]:
    """The engines of `_try_list_engines`, without the views that clash."""
    while True:
        try:
            return _try_list_engines(search, make)
        except ViewClashError as clash:
            search.refuse_views(clash.layers)


@dataclass(frozen=True)
class _Variant:
    """An assignment of options for the lowered network, or for one with some fused layers unfused."""

    what: str
    assignment: Assignment
    lowered: Network
    unfused: list[tuple[str, str]]


def _try_list_engines(search: Search, make: Make) -> list[EngineCandidate]:
    """The engine of least total time first, then others: fused layers unfused, fewer reformats, one format throughout. Raises ViewClashError."""
    options = {layer.name: search.list_usable(layer, search.net) for layer in search.net.layers}
    first = _Variant("least sum of times", choose_formats(search.net, options, search.reformats.cost), search.net, [])
    several = search.timer is not None and search.backend.capabilities.executes and search.config.whole_engines > 1
    several = several and not search.cannot_win(first.assignment.cost)
    variants = [first]
    if several:
        unfused = find_unfused_variant(search)
        if unfused is not None:
            variants = [unfused, first] if unfused.assignment.cost < first.assignment.cost else [first, unfused]
        variants += _filter_variants(search, variants, _list_other_variants(search, variants[0], options if variants[0] is first else None))
    distinct: list[_Variant] = []
    for variant in variants:
        if all(variant.assignment.differs_from(other.assignment) for other in distinct):
            distinct.append(variant)
    return [_make_candidate(search, variant, make) for variant in distinct[: max(search.config.whole_engines, 1) if several else 1]]


def find_unfused_variant(search: Search) -> _Variant | None:
    """The least sum of times of the network in which fused layers slower than their parts are unfused; None if there are none."""
    result = unfuse_slower(search)
    if result is None:
        return None
    net, unfused = result
    options = {layer.name: search.list_usable(layer, net) for layer in net.layers}
    what = f"least sum of times, {len(unfused)} layer{'s' if len(unfused) > 1 else ''} unfused"
    return _Variant(what, choose_formats(net, options, search.reformats.cost), net, unfused)


def _list_other_variants(search: Search, base: _Variant, known: Mapping[str, list[Option]] | None) -> list[_Variant]:
    """Assignments that may be faster in the network although the sum of their times is larger."""
    net, cost = base.lowered, search.reformats.cost
    options = known or {layer.name: search.list_usable(layer, net) for layer in net.layers}

    def make_variant(description: str, options: Mapping[str, list[Option]], cost: ReformatCost) -> _Variant:
        return _Variant(description, choose_formats(net, options, cost), net, base.unfused)

    float32 = {n: [o for o in group if not stores_float16(o)] or group for n, group in options.items()}
    changes = not search.backend.capabilities.overlapping_launches and any(len(float32[n]) < len(options[n]) for n in float32)
    without_float16 = [make_variant(WIDE, float32, cost)] if changes else []
    formats = sorted({o.format for group in options.values() for x in group for o in x.signature.outputs} - {"linear"})
    single = [make_variant(f"{f} wherever it can be", _restrict_to_format(options, f), cost) for f in formats]
    single.sort(key=lambda w: compute_total_time(net, w.assignment.picked, list_links(net), cost))
    threefold = make_variant("reformats weighted threefold", options, _scale_cost(cost, 3.0))
    third = make_variant("reformats weighted a third", options, _scale_cost(cost, 0.3))
    return [*without_float16, *single[:1], threefold, *single[1:], third]


def _filter_variants(search: Search, known: Sequence[_Variant], others: Sequence[_Variant]) -> list[_Variant]:
    """Drops variants if their sum of times exceeds the least by more than SUM_MARGIN. Keeps all if launches overlap: the sum then predicts little,
    and a run is short."""
    if search.backend.capabilities.overlapping_launches:
        return list(others)
    least = min(w.assignment.cost for w in known)
    return [
        w for w in others if compute_total_time(w.lowered, w.assignment.picked, list_links(w.lowered), search.reformats.cost) <= SUM_MARGIN * least
    ]


def _make_candidate(search: Search, variant: _Variant, make: Make) -> EngineCandidate:
    net, chosen = with_reformats(variant.lowered, variant.assignment.picked, search.reformats)
    chosen = resolve_clashes(net, chosen, search.select_copy)
    return EngineCandidate(variant.what, variant.assignment, variant.lowered, variant.unfused, net, chosen, make(net, chosen))


def _scale_cost(cost: Callable[[Tensor, Operand, Operand], float], factor: float):
    return lambda t, a, b: factor * cost(t, a, b)


def _restrict_to_format(options: Mapping[str, list[Option]], f: str) -> dict[str, list[Option]]:
    """The options that write format `f`, for layers that have such options; else all."""
    return {n: [o for o in group if any(x.format == f for x in o.signature.outputs)] or group for n, group in options.items()}


__all__ = ["BrokenKernel", "SelectedEngine", "select_engine", "time_and_select"]

"""Whole engines: the best few different ones are built and timed end to end, because a sum of layer times is not the network's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whet.builder.candidates.filter import is_narrow
from whet.builder.candidates.reformats import with_reformats
from whet.builder.candidates.views import StuckViews, settled
from whet.builder.select.engine_candidate import BrokenKernel, Entry, Make, Stand
from whet.builder.select.formats import Choosing, ReformatCost, choose, links, total
from whet.builder.select.fusion import time_unfused, unfuse_slower
from whet.builder.select.refine import refined_entry
from whet.builder.select.search import SUM_MARGIN, Search
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.report import EngineTime, SelectionRecord
from whet.measure.compare import compare
from whet.measure.layer_profile import profile_layers
from whet.measure.option import Option
from whet.measure.policy import ENGINE_NEAR, ENGINES, RECALL_DOUBT
from whet.network import Network, Tensor
from whet.tactics import Operand

WIDE = "no 16-bit floats"  # types are chosen by the sum of layers' times; the clock judges the whole without


@dataclass
class Best:
    """The engine that was kept, and all that were timed."""

    entry: Entry
    engines: list[EngineTime]
    estimate_ms: float
    recalled: bool = False  # by times that the timing cache remembered

    @property
    def plan(self) -> EnginePlan:
        return self.entry.plan

    @property
    def doubtful(self) -> bool:
        """Whether the engine that was kept by remembered times takes clearly longer now than another was remembered to take: they may be of a
        moment in which something that shows in no process slowed the machine, another virtual machine of its host say."""
        others = [e.ms for e in self.engines[1:]]
        return self.recalled and not self.entry.disturbed and bool(others) and self.engines[0].ms > RECALL_DOUBT * min(others)

    @property
    def chosen(self) -> dict[str, Option]:
        return self.entry.chosen

    def choice_report(self) -> SelectionRecord:
        c = self.entry.choosing
        timed = "by an earlier build (timing cache)" if self.recalled else ""
        return SelectionRecord(c.method, self.estimate_ms, self.entry.what, timed, len(c.core), dict(c.tried) if c.core else {})


def best_engine(search: Search, make: Make) -> Best:
    """Chooses, builds the different engines worth a try, times them in turns, keeps the fastest (the first where they do not differ)."""
    search.tell.stage("choice", 1)
    entries = _settled_entries(search, make)
    timed = search.timer is not None and search.backend.capabilities.executes and search.config.whole_engines > 0
    if not timed:
        first = entries[0]
        return Best(first, [], first.choosing.cost)
    search.tell.stage("whole engines", len(entries) + 3)  # the runners-up in one, what was changed for them, the last look
    stand = Stand(search, probe_inputs(entries[0].plan.network, search.config.seed, probe_shapes(entries[0].plan)))
    best = _raced(search, make, stand, list(entries))
    if search.retime_contradictions(best.entry.lowered, best.chosen, best.entry.ms):
        time_unfused(search)
        entries = _settled_entries(search, make)
        best = _raced(search, make, stand, list(entries))
    return _raced(search, make, stand, entries, anew=True) if best.doubtful else best


def _raced(search: Search, make: Make, stand: Stand, entries: list[Entry], *, anew: bool = False) -> Best:
    """The fastest of these and of one with kernels chosen in the network; by what the timing cache remembers, unless all are timed `anew`."""
    _timed(search, entries, stand, anew)
    if search.config.optimization_level >= 3 and search.config.in_network and not search.cannot_win(entries[0].choosing.cost):
        search.tell.phase("choice in the network")
        refined = refined_entry(search, min(entries, key=lambda e: e.ms), make, stand)
        search.tell.phase("whole engines")
        if refined is not None:
            overlaps, lead = search.backend.capabilities.overlapping_launches, min(entries, key=lambda e: e.ms)
            least = lead.ms
            entries.append(refined)
            again = entries if overlaps else [e for e in entries if e is refined or e.ms <= ENGINE_NEAR * least]
            _timed(search, again, stand, anew)
            for e in entries:
                e.pace = 1.0 if e in again else lead.ms / least  # who was not timed again is compared as it would be now
            if overlaps and refined.ms <= min(e.ms for e in entries):
                entries.insert(0, entries.pop())  # each of its changes was faster in the network: that it is by less than the noise now is no reason
    kept = _earliest(entries)
    recalled = not kept.samples
    if recalled:
        stand.bound(kept)
        _time(search, [kept])  # what the report says, and whether to believe what is remembered
    search.tell.step("in place")
    kept.plan.report.latency_ms = kept.ms
    bound = stand.bound(kept)
    kept.plan.report.layer_ms = profile_layers(bound.run_timed, [layer.name for layer in kept.net.layers], kept.ms, search.backend.watch)
    engines = [EngineTime(e.what, e.ms, e.spread) for e in (kept, *(e for e in entries if e is not kept))]
    return Best(kept, engines, kept.choosing.cost, recalled)


def _timed(search: Search, entries: list[Entry], stand: Stand, anew: bool) -> None:
    """Sets the times of all entries: those that the timing cache remembers of just these engines, or measured now (all that are timed `anew`)."""
    known = None if anew else search.history.read_times(entries)
    for k, e in enumerate(entries):
        e.samples, e.told, e.pace = [], None if known is None else known[k], 1.0
    if known is None:
        for e in entries:
            stand.bound(e)
        _time(search, entries)
        search.history.write_times(entries)


def _settled_entries(search: Search, make: Make) -> list[Entry]:
    """`_entries`, with as many views as can lie side by side."""
    while True:
        try:
            return _entries(search, make)
        except StuckViews as stuck:
            search.refuse_views(stuck.layers)


@dataclass(frozen=True)
class _Way:
    """A choice for the lowered network, or for one with fused layers taken apart."""

    what: str
    choosing: Choosing
    lowered: Network
    unfused: list[tuple[str, str]]


def _entries(search: Search, make: Make) -> list[Entry]:
    """The engine of least total time first, then others that differ: fused layers whole or apart, fewer reformats, one format throughout."""
    options = {layer.name: search.list_usable(layer, search.net) for layer in search.net.layers}
    first = _Way("least sum of times", choose(search.net, options, search.reformats.cost), search.net, [])
    several = search.timer is not None and search.backend.capabilities.executes and search.config.whole_engines > 1
    several = several and not search.cannot_win(first.choosing.cost)
    ways = [first]
    if several:
        apart = _apart_way(search)
        if apart is not None:
            ways = [apart, first] if apart.choosing.cost < first.choosing.cost else [first, apart]
        ways += _worth_a_try(search, ways, _other_ways(search, ways[0], options if ways[0] is first else None))
    found: list[_Way] = []
    for way in ways:
        if all(_differ(way.choosing, other.choosing) for other in found):
            found.append(way)
    return [_entry(search, way, make) for way in found[: max(search.config.whole_engines, 1) if several else 1]]


def _differ(a: Choosing, b: Choosing) -> bool:
    return a.picked.keys() != b.picked.keys() or any(a.picked[n] is not b.picked[n] for n in a.picked)


def _apart_way(search: Search) -> _Way | None:
    """The least sum of times with the fused layers apart whose parts win on their own."""
    made = unfuse_slower(search)
    if made is None:
        return None
    net, unfused = made
    options = {layer.name: search.list_usable(layer, net) for layer in net.layers}
    what = f"least sum of times, {len(unfused)} fused layer{'s' if len(unfused) > 1 else ''} apart"
    return _Way(what, choose(net, options, search.reformats.cost), net, unfused)


def _other_ways(search: Search, like: _Way, known: Mapping[str, list[Option]] | None) -> list[_Way]:
    """Choices that may win in the network though the sum of their times is larger."""
    net, cost = like.lowered, search.reformats.cost
    options = known or {layer.name: search.list_usable(layer, net) for layer in net.layers}

    def way(what: str, options: Mapping[str, list[Option]], cost: ReformatCost) -> _Way:
        return _Way(what, choose(net, options, cost), net, like.unfused)

    wide = {n: [o for o in group if not is_narrow(o)] or group for n, group in options.items()}
    changes = not search.backend.capabilities.overlapping_launches and any(len(wide[n]) < len(options[n]) for n in wide)
    without = [way(WIDE, wide, cost)] if changes else []
    formats = sorted({o.format for group in options.values() for x in group for o in x.signature.outputs} - {"linear"})
    single = [way(f"{f} wherever it can be", _only_format(options, f), cost) for f in formats]
    single.sort(key=lambda w: total(net, w.choosing.picked, links(net), cost))
    dear = way("reformats weighted threefold", options, _weighted(cost, 3.0))
    cheap = way("reformats weighted a third", options, _weighted(cost, 0.3))
    return [*without, *single[:1], dear, *single[1:], cheap]


def _worth_a_try(search: Search, known: Sequence[_Way], others: Sequence[_Way]) -> list[_Way]:
    """Those of `others` whose layers and reformats do not take so much longer that the network cannot make up for it. On a machine whose
    launches overlap a sum says less, and a run takes next to nothing: there it is all of them."""
    if search.backend.capabilities.overlapping_launches:
        return list(others)
    least = min(w.choosing.cost for w in known)
    return [w for w in others if total(w.lowered, w.choosing.picked, links(w.lowered), search.reformats.cost) <= SUM_MARGIN * least]


def _entry(search: Search, way: _Way, make: Make) -> Entry:
    net, chosen = with_reformats(way.lowered, way.choosing.picked, search.reformats)
    chosen = settled(net, chosen, search.select_copy)
    return Entry(way.what, way.choosing, way.lowered, way.unfused, net, chosen, make(net, chosen))


def _weighted(cost: Callable[[Tensor, Operand, Operand], float], factor: float):
    return lambda t, a, b: factor * cost(t, a, b)


def _only_format(options: Mapping[str, list[Option]], f: str) -> dict[str, list[Option]]:
    """Where a layer has options that write format `f`, only these."""
    return {n: [o for o in group if any(x.format == f for x in o.signature.outputs)] or group for n, group in options.items()}


def _time(search: Search, entries: Sequence[Entry]) -> None:
    """Compares whole engines; sets their samples."""
    assert search.timer is not None

    def run_of(e: Entry) -> Callable[[], float]:
        bound = e.bound
        assert bound is not None
        return lambda: bound.seconds(1)[0]

    ranking = compare([run_of(e) for e in entries], ENGINES, watch=search.backend.watch, loads=search.timer.loads)
    for e, samples in zip(entries, ranking.samples, strict=True):
        e.samples, e.disturbed, e.pace = [s * 1e3 for s in samples], ranking.disturbed, 1.0


def _earliest(entries: Sequence[Entry]) -> Entry:
    best = min(entries, key=lambda e: e.ms)
    return next(e for e in entries if e.ms - best.ms <= ENGINES.tolerance(best.ms, e.noise(best)))


__all__ = ["Best", "BrokenKernel", "best_engine"]

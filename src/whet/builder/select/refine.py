"""Refining the fastest engine: kernels that are nearly as fast when timed alone may be faster in the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.builder.select.engine_candidate import BenchmarkHarness, EngineCandidate, Make, replace_kernels
from whet.builder.select.search import Search
from whet.measure.compare import Ranking, compare
from whet.measure.in_network import LayerKind, Selection, select_in_network
from whet.measure.policy import LAYER_PAIRS

_CLOSE = 1.3  # times the selected option's own time: slower options are not compared in the network
_RUNNERS_UP = 9  # compared per kind of layer if launches overlap
_IN_NETWORK_S, _KIND_S = 6.0, 1.0  # seconds for all kinds of layers, and for one: slow networks compare fewer options
_REPLAYS = 11  # at least, of each option


def refine_in_network(search: Search, base: EngineCandidate, make: Make, harness: BenchmarkHarness) -> EngineCandidate | None:
    """Compares options of nearly equal speed and the same signature in the network; returns `base` with the faster ones, or None if none is.

    The result of an earlier build for the same engine and options is read from the timing cache.
    """
    kinds = _list_kinds(search, base) if search.backend.capabilities.overlapping_launches else _list_runners_up(search, base)
    if not kinds:
        return None
    picked = search.history.read_selection(base, kinds)
    if picked is None:
        if search.backend.capabilities.overlapping_launches:
            winners = select_in_network(harness.bind(base), kinds, harness.store, _IN_NETWORK_S)
        else:
            winners = _compare_layers(base, kinds, make, harness)
        search.history.write_selection(base, winners)
        picked = {w.kind: w.option for w in winners}
    better = {name: option for kind, option in picked.items() if option is not kind.incumbent for name in kind.layers}
    if not better:
        return None
    return replace_kernels(base, f"{base.what}, {len(better)} layers changed to kernels that are faster in the network", better, make)


def _list_runners_up(search: Search, base: EngineCandidate) -> list[LayerKind]:
    """Each layer by itself, with the fastest other option of its signature if that is nearly as fast alone."""
    kinds = []
    for i, layer in enumerate(base.lowered.layers):
        kind, selected = search.kind_of[layer.name], base.chosen[layer.name]
        close = [o for o in search.kinds[kind].options if o.ms is not None and o.cost <= _CLOSE * selected.cost]
        same = [o for o in close if o.signature == selected.signature and o.ident != selected.ident]
        same = [o for o in same if search.why_not_option(layer, o, base.lowered) is None]
        if same:
            kinds.append(LayerKind(f"layer {i}: {kind}", (layer.name,), selected, (min(same, key=lambda o: o.cost),)))
    return kinds


def _compare_layers(base: EngineCandidate, kinds: Sequence[LayerKind], make: Make, harness: BenchmarkHarness) -> list[Selection]:
    """Compares the engine layer by layer with one in which every kind uses its other option."""
    others = {name: kind.others[0] for kind in kinds for name in kind.layers}
    bounds = (harness.bind(base), harness.bind(replace_kernels(base, "runners-up", others, make)))
    times: tuple[list[list[float]], list[list[float]]] = ([], [])  # by engine, run and layer

    def run(k: int) -> float:
        times[k].append(bounds[k].run_timed())
        return sum(times[k][-1])

    load = compare([lambda: run(0), lambda: run(1)], LAYER_PAIRS).load
    step = {layer.name: i for i, layer in enumerate(base.net.layers)}
    selections = []
    for kind in kinds:
        samples = [[layers[step[kind.layers[0]]] for layers in runs] for runs in times]
        layer = Ranking(LAYER_PAIRS, samples, samples, [0, 1], load=load)
        winner = layer.select([0, layer.fastest()])
        selections.append(Selection(kind, (kind.incumbent, kind.others[0])[winner], layer.seconds(winner) * 1e3))
    return selections


def _list_kinds(search: Search, base: EngineCandidate) -> list[LayerKind]:
    """Layers of equal work and equal option, with the options that are nearly as fast alone; none if the network is too slow for replays."""
    most = min(_RUNNERS_UP, int(_KIND_S / (_REPLAYS * max(base.ms, 1e-6) * 1e-3)))
    if most < 1:
        return []
    groups: dict[tuple[str, Any], list[str]] = {}
    for layer in base.lowered.layers:
        groups.setdefault((search.kind_of[layer.name], base.chosen[layer.name].ident), []).append(layer.name)
    layers = {layer.name: layer for layer in base.lowered.layers}
    kinds = []
    for (kind, _), names in groups.items():
        selected = base.chosen[names[0]]
        close = [o for o in search.kinds[kind].options if o.ms is not None and o.cost <= _CLOSE * selected.cost and o.ident != selected.ident]
        alike = [o for o in close if o.signature == selected.signature]
        same = [o for o in alike if all(search.why_not_option(layers[n], o, base.lowered) is None for n in names)]
        if same:
            kinds.append(LayerKind(kind, tuple(names), selected, tuple(sorted(same, key=lambda o: o.cost)[:most])))
    return kinds

"""The best whole engine once more: kernels that were nearly as fast alone may be faster in the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.builder.select.engine_candidate import Entry, Make, Stand, changed_entry
from whet.builder.select.search import Search
from whet.measure.compare import Ranking, compare
from whet.measure.in_network import LayerKind, Selection, select_in_network
from whet.measure.policy import LAYER_PAIRS

_CLOSE = 1.3  # times the selected option's time alone: a runner-up up to here may still win in the network
_RUNNERS_UP = 9  # that are compared where launches overlap
_IN_NETWORK_S, _KIND_S = 6.0, 1.0  # seconds spent on that, and on one kind of layer at most: slow networks compare fewer
_REPLAYS = 11  # of each option at least


def refined_entry(search: Search, base: Entry, make: Make, stand: Stand) -> Entry | None:
    """In the network, what was nearly as fast alone against the options of the same signature; None when nothing wins there.

    What an earlier build found for the same engine and options is taken from the timing cache.
    """
    kinds = _list_kinds(search, base) if search.backend.capabilities.overlapping_launches else _runners_up(search, base)
    if not kinds:
        return None
    picked = search.history.read_selection(base, kinds)
    if picked is None:
        if search.backend.capabilities.overlapping_launches:
            winners = select_in_network(stand.bound(base), kinds, stand.store, _IN_NETWORK_S)
        else:
            winners = _compare_layers(base, kinds, make, stand)
        search.history.write_selection(base, winners)
        picked = {w.kind: w.option for w in winners}
    better = {name: option for kind, option in picked.items() if option is not kind.incumbent for name in kind.layers}
    if not better:
        return None
    return changed_entry(base, f"{base.what}, {len(better)} layers changed for what is faster in the network", better, make)


def _runners_up(search: Search, base: Entry) -> list[LayerKind]:
    """Each layer by itself, with the fastest other option of its signature that was nearly as fast alone."""
    found = []
    for i, layer in enumerate(base.lowered.layers):
        kind, mine = search.kind_of[layer.name], base.chosen[layer.name]
        close = [o for o in search.kinds[kind].options if o.ms is not None and o.cost <= _CLOSE * mine.cost]
        same = [o for o in close if o.signature == mine.signature and o.ident != mine.ident]
        same = [o for o in same if search.why_not(layer, o, base.lowered) is None]
        if same:
            found.append(LayerKind(f"layer {i}: {kind}", (layer.name,), mine, (min(same, key=lambda o: o.cost),)))
    return found


def _compare_layers(base: Entry, kinds: Sequence[LayerKind], make: Make, stand: Stand) -> list[Selection]:
    """Compares the engine layer by layer with one in which every kind has its other option."""
    others = {name: kind.others[0] for kind in kinds for name in kind.layers}
    bounds = (stand.bound(base), stand.bound(changed_entry(base, "runners-up", others, make)))
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


def _list_kinds(search: Search, base: Entry) -> list[LayerKind]:
    """Layers of equal work by equal options, with the options that were nearly as fast alone; none for networks too slow to be replayed often."""
    most = min(_RUNNERS_UP, int(_KIND_S / (_REPLAYS * max(base.ms, 1e-6) * 1e-3)))
    if most < 1:
        return []
    groups: dict[tuple[str, Any], list[str]] = {}
    for layer in base.lowered.layers:
        groups.setdefault((search.kind_of[layer.name], base.chosen[layer.name].ident), []).append(layer.name)
    layers = {layer.name: layer for layer in base.lowered.layers}
    kinds = []
    for (kind, _), names in groups.items():
        mine = base.chosen[names[0]]
        close = [o for o in search.kinds[kind].options if o.ms is not None and o.cost <= _CLOSE * mine.cost and o.ident != mine.ident]
        same = [o for o in close if o.signature == mine.signature and all(search.why_not(layers[n], o, base.lowered) is None for n in names)]
        if same:
            kinds.append(LayerKind(kind, tuple(names), mine, tuple(sorted(same, key=lambda o: o.cost)[:most])))
    return kinds

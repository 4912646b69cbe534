"""The best whole engine once more: kernels that were nearly as fast alone may be faster in the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.builder.select.engine_candidate import Entry, Make, Stand, changed_entry
from whet.builder.select.search import Search
from whet.measure.engine_history import keep_options, recalled_options
from whet.measure.in_network import Kind, Winner, chosen_in_chain
from whet.measure.statistics import typical
from whet.runtime import Bound

_CLOSE = 1.3  # a runner-up this much slower alone may still win in the network
_RUNNERS_UP = 9  # how many take turns where launches overlap
_IN_CHAIN_S, _KIND_S = 6.0, 1.0  # seconds spent on that, and on one kind of layer at most: slow networks compare fewer
_REPLAYS = 11  # of each option at least
_TURNS, _TURNS_S = (3, 7), 1.5  # of two engines, layer against layer; seconds for all of them


def refined_entry(search: Search, base: Entry, make: Make, stand: Stand) -> Entry | None:
    """In the network, what was nearly as fast alone against the options of the same signature; None when nothing wins there.

    What an earlier build found for the same engine and options is taken from the timing cache.
    """
    kinds = _kinds_in_chain(search, base) if search.backend.capabilities.overlapping_launches else _runners_up(search, base)
    if not kinds:
        return None
    picked = recalled_options(search, base, kinds)
    if picked is None:
        if search.backend.capabilities.overlapping_launches:
            winners = chosen_in_chain(stand.bound(base), kinds, stand.store, _IN_CHAIN_S)
        else:
            winners = _chosen_in_turns(base, kinds, make, stand)
        keep_options(search, base, winners)
        picked = {w.kind: w.option for w in winners}
    better = {name: option for kind, option in picked.items() if option is not kind.mine for name in kind.layers}
    if not better:
        return None
    return changed_entry(base, f"{base.what}, {len(better)} layers changed for what is faster in the network", better, make)


def _runners_up(search: Search, base: Entry) -> list[Kind]:
    """Each layer by itself, with the fastest other option of its signature that was nearly as fast alone."""
    found = []
    for i, layer in enumerate(base.lowered.layers):
        kind, mine = search.kind_of[layer.name], base.chosen[layer.name]
        close = [o for o in search.kinds[kind].options if o.ms is not None and o.cost <= _CLOSE * mine.cost]
        same = [o for o in close if o.signature == mine.signature and o.ident != mine.ident]
        same = [o for o in same if search.why_not(layer, o, base.lowered) is None]
        if same:
            found.append(Kind(f"layer {i}: {kind}", (layer.name,), mine, (min(same, key=lambda o: o.cost),)))
    return found


def _chosen_in_turns(base: Entry, kinds: Sequence[Kind], make: Make, stand: Stand) -> list[Winner]:
    """The engine in turns with one in which every kind has its other option, layer against layer."""
    others = {name: kind.others[0] for kind in kinds for name in kind.layers}
    a, b = _turns(stand.bound(base), stand.bound(changed_entry(base, "runners-up", others, make)))
    at = {layer.name: i for i, layer in enumerate(base.net.layers)}
    winners = []
    for kind in kinds:
        mine, other = (typical(x[at[kind.layers[0]]], True) for x in (a, b))
        winners.append(Winner(kind, kind.others[0], other * 1e3) if other < 0.97 * mine else Winner(kind, kind.mine, mine * 1e3))
    return winners


def _kinds_in_chain(search: Search, base: Entry) -> list[Kind]:
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
            kinds.append(Kind(kind, tuple(names), mine, tuple(sorted(same, key=lambda o: o.cost)[:most])))
    return kinds


def _turns(a: Bound, b: Bound) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of each layer of two engines, run in turns."""
    runs: tuple[list[list[float]], list[list[float]]] = ([], [])
    turns = _TURNS[1]
    while len(runs[0]) < turns:
        runs[0].append(a.run_timed())
        runs[1].append(b.run_timed())
        once = sum(runs[0][-1]) + sum(runs[1][-1])
        turns = max(_TURNS[0], min(turns, int(_TURNS_S / max(once, 1e-6))))
    return [list(x) for x in zip(*runs[0], strict=True)], [list(x) for x in zip(*runs[1], strict=True)]

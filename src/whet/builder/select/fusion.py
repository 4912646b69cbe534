"""Fused layers of a search against their parts: every kind of them is timed so, and a network is made without those that lose."""

from __future__ import annotations

import dataclasses

from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.unfuse import unfuse
from whet.builder.select.search import Search
from whet.builder.select.unfused_time import Apart, chains_apart, taken_apart, timed_apart
from whet.measure.option import Option
from whet.measure.policy import FUSED_ROUNDS
from whet.network import Layer, Network
from whet.ops import bind_layer
from whet.tactics import anchor

_LEVEL = 3  # from which fused layers are timed against their parts


def list_parts(search: Search) -> None:
    """Lists the parts that will be timed each by itself, so that they compile while other layers are timed; for machines that compile ahead."""
    if _looks(search) and search.backend.capabilities.compiles_ahead:
        for layer in [x for x in search.layers.values() if x.op == "Fused" and anchor(x) is x]:
            for part in taken_apart(layer).layers:
                search.listed_kind(bind_layer(part, {}))


def time_apart(search: Search) -> None:
    """Times what fused layers take when they are taken apart, at the levels that time a lot; sets `search.apart` by kind."""
    if not _looks(search):
        return
    assert search.timer is not None
    timer = dataclasses.replace(search.timer, rounds=min(FUSED_ROUNDS, search.timer.rounds))
    chains: dict[str, tuple[Option, list[Option]]] = {}
    search.tell.phase("fused or apart")
    for kind in dict.fromkeys(k for n, k in search.kind_of.items() if search.layers[n].op == "Fused"):
        found = search.kinds[kind]
        if kind in search.apart or not found.options:
            continue
        kernels = [o for o in found.options if not o.tactic.fallback]
        if len(kernels) == 1 and kernels[0].ms is None:
            search.timer.time(found.layer, found.text, kernels)
        timed = [o for o in kernels if o.ms is not None]
        if not timed:
            continue
        best = min(timed, key=lambda o: o.cost)
        if anchor(found.layer) is found.layer:
            search.apart[kind] = _parts_alone(search, found.layer, best)
            continue
        listed = chains_apart(found.layer, best, {o.tactic.name for o in kernels}, search.tactics, search.permissions, search.backend)
        if isinstance(listed, Apart):
            search.apart[kind] = listed
            continue
        start_compiling(listed, search.backend)
        chains[kind] = best, listed
    search.tell.stage("fused or apart", len(chains))
    for kind, (best, listed) in chains.items():
        search.tell.step(search.kinds[kind].layer.name)
        search.apart[kind] = timed_apart(search.kinds[kind].layer, search.kinds[kind].text, best, listed, timer)


def without_fused(search: Search) -> tuple[Network, list[tuple[str, str]]] | None:
    """A copy of the network with the fused layers taken apart whose parts win on their own, and (layer, why); None when none does.

    The parts' candidates are listed and timed.
    """
    apart = {x.name: search.apart.get(search.kind_of[x.name]) for x in search.net.layers}
    won = {name: found for name, found in apart.items() if found is not None and found.wins}
    if not won:
        return None
    net = search.net.clone()
    for name in won:
        parts = unfuse(net, next(x for x in net.layers if x.name == name))
        if not all(search.list_layer(part).options for part in parts):
            return None
    search.time_all()
    return net, [(name, str(found)) for name, found in won.items()]


def _looks(search: Search) -> bool:
    return search.timer is not None and search.config.optimization_level >= _LEVEL and search.backend.capabilities.executes


def _parts_alone(search: Search, layer: Layer, best: Option) -> Apart:
    """A layer around no single op against the sum of its parts' best times, each tuned like any other layer."""
    assert search.timer is not None
    picked = []
    for part in taken_apart(layer).layers:
        found = search.kinds[search.listed_kind(bind_layer(part, {}))]
        if len(found.options) > 1 or any(not o.signature.inplace for o in found.options):
            search.time_kind(found)
        options = [o for o in found.options if not o.tactic.fallback and (o.ms is not None or o.signature.inplace)]
        if not options:
            return Apart(reason=f"its part {part.op} has no kernel")
        picked.append(min(options, key=lambda o: o.cost))
    ms, spread = sum(o.cost for o in picked), max(o.spread_ms for o in picked)
    return Apart(best.cost, ms, spread, str(best.signature), " + ".join(f"{o.tactic.name} {o.kernel.implementation}" for o in picked))

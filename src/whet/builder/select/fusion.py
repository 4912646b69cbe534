"""Timing each kind of fused layer against its parts, and making a network without the fused layers that are slower."""

from __future__ import annotations

import dataclasses

from whet.builder.candidates.compile_ahead import start_compiling
from whet.builder.candidates.unfuse import list_parts, unfuse
from whet.builder.select.search import Search
from whet.builder.select.unfused_time import UnfusedTime, list_chains, time_chains
from whet.measure.option import Option
from whet.measure.policy import FUSED_ROUNDS
from whet.network import Layer, Network
from whet.ops import bind_layer
from whet.tactics import get_root_layer

_LEVEL = 3  # from which fused layers are timed against their parts


def list_fused_parts(search: Search) -> None:
    """Lists the parts that will be timed one by one, so that they compile while other layers are timed (backends that compile ahead)."""
    if _is_enabled(search) and search.backend.capabilities.compiles_ahead:
        for layer in [x for x in search.layers.values() if x.op == "Fused" and get_root_layer(x) is x]:
            for part in list_parts(layer).layers:
                search.listing.list_kind(bind_layer(part, {}))


def time_unfused(search: Search) -> None:
    """Times the parts of fused layers, from level 3 on; sets `search.unfused_times` by kind."""
    if not _is_enabled(search):
        return
    assert search.timer is not None
    timer = dataclasses.replace(search.timer, rounds=min(FUSED_ROUNDS, search.timer.rounds))
    chains: dict[str, tuple[Option, list[Option]]] = {}
    search.log.phase("fused or unfused")
    for kind in dict.fromkeys(k for n, k in search.kind_of.items() if search.layers[n].op == "Fused"):
        found = search.kinds[kind]
        if kind in search.unfused_times or not found.options:
            continue
        kernels = [o for o in found.options if not o.tactic.fallback]
        if len(kernels) == 1 and kernels[0].ms is None:
            search.timer.time(found.layer, found.text, kernels)
        timed = [o for o in kernels if o.ms is not None]
        if not timed:
            continue
        best = min(timed, key=lambda o: o.cost)
        if get_root_layer(found.layer) is found.layer:
            search.unfused_times[kind] = _time_parts(search, found.layer, best)
            continue
        listed = list_chains(found.layer, best, {o.tactic.name for o in kernels}, search.tactics, search.permissions, search.backend)
        if isinstance(listed, UnfusedTime):
            search.unfused_times[kind] = listed
            continue
        start_compiling(listed, search.backend)
        chains[kind] = best, listed
    search.log.stage("fused or unfused", len(chains))
    for kind, (best, listed) in chains.items():
        search.log.step(search.kinds[kind].layer.name)
        search.unfused_times[kind] = time_chains(search.kinds[kind].layer, search.kinds[kind].text, best, listed, timer)


def unfuse_slower(search: Search) -> tuple[Network, list[tuple[str, str]]] | None:
    """A copy of the network in which fused layers that are slower than their parts are unfused, and (layer, reason) for each; None if there are
    none.

    Lists and times the candidates of the parts.
    """
    times = {x.name: search.unfused_times.get(search.kind_of[x.name]) for x in search.net.layers}
    won = {name: found for name, found in times.items() if found is not None and found.wins}
    if not won:
        return None
    net = search.net.clone()
    for name in won:
        parts = unfuse(net, next(x for x in net.layers if x.name == name))
        if not all(search.listing.list_layer(part).options for part in parts):
            return None
    search.time_all()
    return net, [(name, str(found)) for name, found in won.items()]


def _is_enabled(search: Search) -> bool:
    return search.timer is not None and search.config.optimization_level >= _LEVEL and search.backend.capabilities.executes


def _time_parts(search: Search, layer: Layer, best: Option) -> UnfusedTime:
    """Compares a fused layer that has no root operation with the sum of its parts' best times, each timed like any other layer."""
    assert search.timer is not None
    picked = []
    for part in list_parts(layer).layers:
        found = search.kinds[search.listing.list_kind(bind_layer(part, {}))]
        if len(found.options) > 1 or any(not o.signature.inplace for o in found.options):
            search.timing.time_kind(found)
        options = [o for o in found.options if not o.tactic.fallback and (o.ms is not None or o.signature.inplace)]
        if not options:
            return UnfusedTime(reason=f"its part {part.op} has no kernel")
        picked.append(min(options, key=lambda o: o.cost))
    ms, spread = sum(o.cost for o in picked), max(o.spread_ms for o in picked)
    return UnfusedTime(best.cost, ms, spread, str(best.signature), " + ".join(f"{o.tactic.name} {o.kernel.implementation}" for o in picked))

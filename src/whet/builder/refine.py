"""The best whole engine once more: kernels that were nearly as fast alone may be faster in the network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from whet.builder.candidates import Option
from whet.builder.entries import Entry, Make, bound_entry, changed_entry
from whet.builder.in_chain import Kind, Winner, chosen_in_chain
from whet.builder.search import Search
from whet.builder.timing import typical
from whet.builder.timing_cache import Timed
from whet.runtime import Bound, WeightStore

_CLOSE = 1.3  # a runner-up this much slower alone may still win in the network
_CLOSE_IN_CHAIN, _RUNNERS_UP = 1.5, 9  # the same where launches overlap, and how many take turns there
_IN_CHAIN_S, _KIND_S = 6.0, 1.0  # seconds spent on that, and on one kind of layer at most: slow networks compare fewer
_REPLAYS = 11  # of each option at least
_METHOD = 1  # of choosing in the network; raise it when choices of another kind come out


def refined_entry(search: Search, base: Entry, make: Make, inputs: Mapping[str, np.ndarray], store: WeightStore) -> Entry | None:
    """In the network, layer by layer, against the runner-up of the same signature: what wins there is taken. None when nothing does."""
    if getattr(search.machine, "overlaps", False):
        return _refined_in_chain(search, base, make, inputs, store)
    others: dict[str, Option] = {}
    for layer in base.lowered.layers:
        mine = base.chosen[layer.name]
        close = [o for o in search.kinds[search.kind_of[layer.name]].options if o.ms is not None and o.cost <= _CLOSE * mine.cost]
        same = [o for o in close if o.signature == mine.signature and o.ident != mine.ident]
        same = [o for o in same if search.why_not(layer, o, base.lowered) is None]
        if same:
            others[layer.name] = min(same, key=lambda o: o.cost)
    if not others:
        return None
    alternative = changed_entry(base, "runners-up", others, make)
    alternative.bound = bound_entry(search, alternative, inputs, store)
    assert base.bound is not None
    a, b = _turns(base.bound, alternative.bound)
    better = {}
    for i, layer in enumerate(base.net.layers):
        if layer.name in others and typical(b[i], True) < 0.97 * typical(a[i], True):
            better[layer.name] = others[layer.name]
    if not better:
        return None
    refined = changed_entry(base, f"{base.what}, {len(better)} layers changed for what is faster in the network", better, make)
    refined.bound = bound_entry(search, refined, inputs, store)
    return refined


def _refined_in_chain(search: Search, base: Entry, make: Make, inputs: Mapping[str, np.ndarray], store: WeightStore) -> Entry | None:
    """As `refined_entry` where launches overlap: whole replays, kind by kind, against all options that were nearly as fast alone."""
    most = min(_RUNNERS_UP, int(_KIND_S / (_REPLAYS * max(base.ms, 1e-6) * 1e-3)))
    if most < 1:
        return None
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
    picked = _remembered(search, base, kinds)
    if picked is None:
        assert base.bound is not None
        winners = chosen_in_chain(base.bound, kinds, store, _IN_CHAIN_S)
        _remember(search, base, winners)
        picked = {w.kind: w.option for w in winners}
    better = {name: option for kind, option in picked.items() if option is not kind.mine for name in kind.layers}
    if not better:
        return None
    refined = changed_entry(base, f"{base.what}, {len(better)} layers changed for what is faster in the network", better, make)
    refined.bound = bound_entry(search, refined, inputs, store)
    return refined


def _remembered(search: Search, base: Entry, kinds: Sequence[Kind]) -> dict[Kind, Option] | None:
    """What an earlier build chose for the same kinds from the same options in the same network, out of the timing cache."""
    timer, text = search.timer, _network_text(search, base, kinds)
    assert timer is not None
    picked = {}
    for kind in kinds:
        for option in (kind.mine, *kind.others):
            if timer.cache.get(timer.key(option, f"{text}\n{kind.text}")) is not None:
                picked[kind] = option
                break
        else:
            return None
    return picked


def _remember(search: Search, base: Entry, winners: Sequence[Winner]) -> None:
    timer, text = search.timer, _network_text(search, base, [w.kind for w in winners])
    assert timer is not None
    for w in winners:
        about = {
            "tactic": w.option.tactic.name,
            "layer": w.kind.text,
            "implementation": w.option.kernel.implementation,
            "what": "the network with it",
        }
        timer.cache.put(timer.key(w.option, f"{text}\n{w.kind.text}"), Timed(w.ms if isfinite(w.ms) else w.option.cost, 0.0, 1), about)


def _network_text(search: Search, base: Entry, kinds: Sequence[Kind]) -> str:
    """What a choice in the network depends on: its layers, what each runs by, and what was to choose from."""
    layers = [(search.kind_of.get(layer.name, ""), str(base.chosen[layer.name].ident)) for layer in base.net.layers]
    options = [[str(o.ident) for o in (kind.mine, *kind.others)] for kind in kinds]
    return "in the network " + hashlib.sha256(json.dumps([_METHOD, layers, options]).encode()).hexdigest()


def _turns(a: Bound, b: Bound, rounds: int = 7) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of each layer of two engines, run in turns."""
    runs: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(rounds):
        runs[0].append(a.run_timed())
        runs[1].append(b.run_timed())
    return [list(x) for x in zip(*runs[0], strict=True)], [list(x) for x in zip(*runs[1], strict=True)]

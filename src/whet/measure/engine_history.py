"""What whole networks taught earlier builds, kept in the timing cache: how fast each engine was, which kernels were faster in the network.

No row names anything. A row is found under a key that is worked out from an engine or a kernel which this very build lists, from everything
that was to choose from, the machine, and the sources of the tactics; so a row that is old, damaged or made up is never asked for, or at
worst makes another of the build's own candidates win, which is verified like any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from whet.builder.candidates.option import Option
from whet.builder.select.engine_candidate import Entry
from whet.builder.select.search import Search
from whet.measure.in_network import Kind, Winner
from whet.measure.timing_cache import Timed
from whet.measure.timing_key import source_digest

_METHOD = 3  # of timing and choosing whole networks; raise it when results of another kind come out


def recalled_times(search: Search, entries: Sequence[Entry]) -> list[Timed] | None:
    """What each engine took when all of these were timed in turns, or None unless that is known of every one."""
    assert search.timer is not None
    found = [search.cache.peek(k) for k in _keys(search, entries)]
    return None if None in found else found  # type: ignore[return-value]


def keep_times(search: Search, entries: Sequence[Entry]) -> None:
    """Remembers the times of engines that were timed in turns, and for their spread the noise against the fastest (so that a build that
    recalls them keeps the same one); not those of a machine that had other work."""
    if any(e.disturbed for e in entries):
        return
    best = min(entries, key=lambda e: e.ms)
    with search.cache.together():
        for key, e in zip(_keys(search, entries), entries, strict=True):
            search.cache.put(key, Timed(e.ms, 0.0 if e is best else e.noise(best), len(e.samples)), {"what": f"whole engine: {e.what}"})


def recalled_options(search: Search, base: Entry, kinds: Sequence[Kind]) -> dict[Kind, Option] | None:
    """What an earlier build chose for the same kinds from the same options in the same engine; None unless all of it is known."""
    picked, keys = {}, _option_keys(search, base, kinds)
    for kind in kinds:
        found = next((o for o in (kind.mine, *kind.others) if search.cache.peek(keys[kind, o.ident]) is not None), None)
        if found is None:
            return None
        picked[kind] = found
    return picked


def keep_options(search: Search, base: Entry, winners: Sequence[Winner]) -> None:
    """Remembers which option each kind of layer kept in the network, with the network's milliseconds."""
    keys = _option_keys(search, base, [w.kind for w in winners])
    with search.cache.together():
        for w in winners:
            about = {"tactic": w.option.tactic.name, "layer": w.kind.text, "implementation": w.option.kernel.implementation}
            ms = w.ms if isfinite(w.ms) else w.option.cost  # there was no time left to try it
            search.cache.put(keys[w.kind, w.option.ident], Timed(ms, 0.0, 1), {**about, "what": "the network with it"})


def _keys(search: Search, entries: Sequence[Entry]) -> list[str]:
    """A key for each engine among the others: times are compared with those of the same moment only."""
    texts = [_engine_text(search, e) for e in entries]
    return [_digest(search, (o for e in entries for o in e.chosen.values()), ["engine", k, texts]) for k in range(len(texts))]


def _option_keys(search: Search, base: Entry, kinds: Sequence[Kind]) -> dict[tuple[Kind, Any], str]:
    """A key for each option of each kind of layer in an engine."""
    every = [o for kind in kinds for o in (kind.mine, *kind.others)]
    listed = [[kind.text, len(kind.layers), [str(o.ident) for o in (kind.mine, *kind.others)]] for kind in kinds]
    common = _digest(search, [*base.chosen.values(), *every], ["kernels", _engine_text(search, base), listed])
    return {
        (kind, o.ident): hashlib.sha256(json.dumps([common, k, str(o.ident)]).encode()).hexdigest()
        for k, kind in enumerate(kinds) for o in (kind.mine, *kind.others)
    }  # fmt: skip


def _digest(search: Search, options: Iterable[Option], what: list[Any]) -> str:
    assert search.timer is not None
    tactics = {o.tactic.name: o.tactic for o in options}
    made_of = [[n, t.version, source_digest(t), t.library_version()] for n, t in sorted(tactics.items())]
    return hashlib.sha256(json.dumps([_METHOD, what, made_of, search.timer.about]).encode()).hexdigest()


def _engine_text(search: Search, e: Entry) -> str:
    """Every layer's work and kernel, and which reads what: engines of equal text take equal time."""
    numbers: dict[Any, int] = {t: i for i, t in enumerate(e.net.inputs)}
    rows = []
    for layer in e.net.layers:
        reads = [None if t is None or t.is_constant else numbers[t] for t in layer.inputs]
        for t in layer.outputs:
            numbers[t] = len(numbers)
        rows.append([_work(search.kind_of, layer), str(e.chosen[layer.name].ident), reads])
    ends = [numbers.get(t, -1) for t in e.net.outputs]
    return hashlib.sha256(json.dumps([rows, ends]).encode()).hexdigest()


def _work(kind_of: Mapping[str, str], layer: Any) -> str:
    """The kind of a layer; what a reformat moves (its formats stand in its kernel's signature)."""
    return kind_of.get(layer.name) or f"{layer.op} {layer.outputs[0].type}"

"""Measurements of whole networks, kept in the timing cache: the time of each engine, and which kernels were faster in the network.

A row's key is computed from an engine or a kernel that this build lists itself, from all alternatives, the machine, and the sources of the
tactics. So an outdated, damaged or forged row is never looked up, or at worst makes another of the build's own candidates win, which is
verified like any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

from whet.measure.in_network import LayerKind, Selection
from whet.measure.option import Option
from whet.measure.timing_cache import Timed, TimingCache
from whet.measure.timing_key import compute_source_digest
from whet.network import Network

_METHOD = 3  # version of timing and selecting whole networks; raised when results are no longer comparable


class TimedEngine(Protocol):
    """A whole engine: its network with an option for each layer, and its times."""

    what: str
    net: Network
    chosen: dict[str, Option]
    samples: list[float]
    disturbed: bool

    @property
    def ms(self) -> float: ...

    def noise(self, other: Any) -> float: ...


class EngineHistory:
    """Whole engines and kernels in the network that earlier builds have timed. `kind_of` gives the work of each layer by name, `environment` the
    machine and the state of its caches."""

    def __init__(self, cache: TimingCache, environment: Sequence[str], kind_of: Mapping[str, str]):
        self.cache, self.environment, self.kind_of = cache, environment, kind_of

    def read_times(self, engines: Sequence[TimedEngine]) -> list[Timed] | None:
        """The time of each engine when all of these were compared, or None unless all are known."""
        times = [self.cache.peek(k) for k in self._make_engine_keys(engines)]
        known = [t for t in times if t is not None]
        return known if len(known) == len(times) else None

    def write_times(self, engines: Sequence[TimedEngine]) -> None:
        """Stores the times of engines that were compared with each other, with the noise against the fastest as their spread (so that a build
        that reads them selects the same one). Times of a disturbed comparison are not stored."""
        if any(e.disturbed for e in engines):
            return
        fastest = min(engines, key=lambda e: e.ms)
        with self.cache.transaction():
            for key, e in zip(self._make_engine_keys(engines), engines, strict=True):
                noise = 0.0 if e is fastest else e.noise(fastest)
                self.cache.put(key, Timed(e.ms, noise, len(e.samples)), {"what": f"whole engine: {e.what}"})

    def read_selection(self, base: TimedEngine, kinds: Sequence[LayerKind]) -> dict[LayerKind, Option] | None:
        """The options that an earlier build selected for the same kinds, among the same options, in the same engine; None unless all are known."""
        selected, keys = {}, self._make_option_keys(base, kinds)
        for kind in kinds:
            found = next((o for o in (kind.incumbent, *kind.others) if self.cache.peek(keys[kind, o.ident]) is not None), None)
            if found is None:
                return None
            selected[kind] = found
        return selected

    def write_selection(self, base: TimedEngine, selections: Sequence[Selection]) -> None:
        """Stores which option each kind of layer keeps in the network, with the network's milliseconds."""
        keys = self._make_option_keys(base, [s.kind for s in selections])
        with self.cache.transaction():
            for s in selections:
                about = {"tactic": s.option.tactic.name, "layer": s.kind.text, "implementation": s.option.kernel.implementation}
                ms = s.ms if isfinite(s.ms) else s.option.cost  # not compared for lack of time
                self.cache.put(keys[s.kind, s.option.ident], Timed(ms, 0.0, 1), {**about, "what": "the network with it"})

    def _make_engine_keys(self, engines: Sequence[TimedEngine]) -> list[str]:
        """A key for each engine among the others: only times of the same moment are compared."""
        texts = [self.digest_engine(e) for e in engines]
        return [self._compute_digest((o for e in engines for o in e.chosen.values()), ["engine", k, texts]) for k in range(len(texts))]

    def _make_option_keys(self, base: TimedEngine, kinds: Sequence[LayerKind]) -> dict[tuple[LayerKind, Any], str]:
        """A key for each option of each kind of layer in an engine."""
        every = [o for kind in kinds for o in (kind.incumbent, *kind.others)]
        listed = [[kind.text, len(kind.layers), [str(o.ident) for o in (kind.incumbent, *kind.others)]] for kind in kinds]
        common = self._compute_digest([*base.chosen.values(), *every], ["kernels", self.digest_engine(base), listed])
        return {
            (kind, o.ident): hashlib.sha256(json.dumps([common, k, str(o.ident)]).encode()).hexdigest()
            for k, kind in enumerate(kinds) for o in (kind.incumbent, *kind.others)
        }  # fmt: skip

    def _compute_digest(self, options: Iterable[Option], content: list[Any]) -> str:
        tactics = {o.tactic.name: o.tactic for o in options}
        sources = [[n, t.version, compute_source_digest(t), t.library_version()] for n, t in sorted(tactics.items())]
        return hashlib.sha256(json.dumps([_METHOD, content, sources, self.environment]).encode()).hexdigest()

    def digest_engine(self, e: TimedEngine) -> str:
        """A digest of every layer's work, kernel and inputs: engines of equal text take equal time."""
        numbers: dict[Any, int] = {t: i for i, t in enumerate(e.net.inputs)}
        rows = []
        for layer in e.net.layers:
            reads = [None if t is None or t.is_constant else numbers[t] for t in layer.inputs]
            for t in layer.outputs:
                numbers[t] = len(numbers)
            work = self.kind_of.get(layer.name) or f"{layer.op} {layer.outputs[0].type}"  # a reformat's formats are in its kernel's signature
            rows.append([work, str(e.chosen[layer.name].ident), reads])
        ends = [numbers.get(t, -1) for t in e.net.outputs]
        return hashlib.sha256(json.dumps([rows, ends]).encode()).hexdigest()

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
from typing import Any, Protocol, TypeVar

from whet.measure.in_network import LayerKind, Selection
from whet.measure.option import Option
from whet.measure.timing_cache import Timed, TimingCache
from whet.measure.timing_key import compute_source_digest
from whet.network import Network
from whet.tactics import Tactic

_METHOD = 4  # version of timing and selecting whole networks; raised when results are no longer comparable
_IDLE, _LOADED = "whole engine", "whole engine under external load"  # states of the machine during a comparison


def make_keys(tactics: Iterable[Tactic], environment: Any, contents: Sequence[list[Any]]) -> list[str]:
    """A digest of each content, with the sources and libraries of the tactics, and `environment`: the machine and the method of timing."""
    by_name = {t.name: t for t in tactics}
    sources = [[n, t.version, compute_source_digest(t), t.library_version()] for n, t in sorted(by_name.items())]
    return [hashlib.sha256(json.dumps([content, sources, environment]).encode()).hexdigest() for content in contents]


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


Engine = TypeVar("Engine", bound=TimedEngine)


class EngineHistory:
    """Whole engines and kernels in the network that earlier builds have timed. `kind_of` gives the work of each layer by name, `environment` the
    machine and the state of its caches."""

    def __init__(self, cache: TimingCache, environment: Sequence[str], kind_of: Mapping[str, str]):
        self.cache, self.environment, self.kind_of = cache, environment, kind_of

    def read_times(self, engines: Sequence[TimedEngine], *, disturbed: bool = False) -> list[Timed] | None:
        """The time of each engine when all of these were compared, or None unless all are known. `disturbed`: those of a comparison under external
        load."""
        return self._read_all(self._make_engine_keys(engines, _LOADED if disturbed else _IDLE))

    def write_times(self, engines: Sequence[TimedEngine]) -> None:
        """Stores the times of engines that were compared with each other, with the noise against the fastest as their spread. Times of a disturbed
        comparison are stored under other keys."""
        state = _LOADED if any(e.disturbed for e in engines) else _IDLE
        fastest = min(engines, key=lambda e: e.ms)
        with self.cache.transaction():
            for key, e in zip(self._make_engine_keys(engines, state), engines, strict=True):
                noise = 0.0 if e is fastest else e.noise(fastest)
                self.cache.put(key, Timed(e.ms, noise, len(e.samples)), {"what": f"{state}: {e.what}"})

    def read_selected(self, engines: Sequence[Engine]) -> Engine | None:
        """The engine that the last comparison of exactly these engines has selected, or None if it is not known."""
        known = [e for key, e in zip(self._make_selected_keys(engines), engines, strict=True) if self.cache.peek(key) is not None]
        return known[0] if len(known) == 1 else None

    def write_selected(self, engines: Sequence[Engine], selected: Engine) -> None:
        """Stores which of these engines was selected, so that a later build makes the same engine."""
        with self.cache.transaction():
            for key, e in zip(self._make_selected_keys(engines), engines, strict=True):
                if e is selected:
                    self.cache.put(key, Timed(e.ms, 0.0, 1), {"what": f"selected engine: {e.what}"})
                else:
                    self.cache.remove(key)

    def read_layer_times(self, engine: TimedEngine) -> dict[str, float] | None:
        """The milliseconds of each layer in this engine, run launch by launch, or None unless all are known."""
        times = self._read_all(self._make_layer_keys(engine))
        return None if times is None else {layer.name: t.ms for layer, t in zip(engine.net.layers, times, strict=True)}

    def write_layer_times(self, engine: TimedEngine, layer_ms: Mapping[str, float]) -> None:
        """Stores the times of an engine's layers."""
        with self.cache.transaction():
            for key, layer in zip(self._make_layer_keys(engine), engine.net.layers, strict=True):
                self.cache.put(key, Timed(layer_ms[layer.name], 0.0, 1), {"what": f"layer of a whole engine: {layer.op}"})

    def _read_all(self, keys: Sequence[str]) -> list[Timed] | None:
        """The times under these keys, or None unless all are known."""
        times = [self.cache.peek(key) for key in keys]
        known = [t for t in times if t is not None]
        return known if len(known) == len(times) else None

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
                for o in (s.kind.incumbent, *s.kind.others):
                    if o.ident != s.option.ident:
                        self.cache.remove(keys[s.kind, o.ident])  # selected by an earlier build
                self.cache.put(keys[s.kind, s.option.ident], Timed(ms, 0.0, 1), {**about, "what": "the network with it"})

    def _make_engine_keys(self, engines: Sequence[TimedEngine], state: str) -> list[str]:
        """A key for each engine among the others: only times of the same moment are compared."""
        texts = [self.digest_engine(e) for e in engines]
        return self._make_keys((o for e in engines for o in e.chosen.values()), [[state, k, texts] for k in range(len(texts))])

    def _make_selected_keys(self, engines: Sequence[TimedEngine]) -> list[str]:
        """A key for each engine among the others, whatever their order. Engines of equal text have different keys."""
        texts = [self.digest_engine(e) for e in engines]
        contents = [["selected engine", text, texts[:k].count(text), sorted(texts)] for k, text in enumerate(texts)]
        return self._make_keys((o for e in engines for o in e.chosen.values()), contents)

    def _make_layer_keys(self, engine: TimedEngine) -> list[str]:
        """A key for each layer of an engine."""
        text = self.digest_engine(engine)
        return self._make_keys(engine.chosen.values(), [["layer of an engine", k, text] for k in range(len(engine.net.layers))])

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
        return self._make_keys(options, [content])[0]

    def _make_keys(self, options: Iterable[Option], contents: Sequence[list[Any]]) -> list[str]:
        """A digest of each content, with the sources of the tactics, the machine and the method."""
        return make_keys((o.tactic for o in options), [_METHOD, self.environment], contents)

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

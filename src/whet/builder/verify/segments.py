"""Networks that differ from a base network in few layers: only the segments that differ are run; earlier values come from a cache.

The network is cut at points that few tensors cross. For each derived network (some layers in low precision) only segments that no earlier
network contained are built. It runs from its first segment that differs from the base network, on the base network's values at that cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from whet.builder.verify.engine_values import EngineRun, SharedParts
from whet.forks import make_lock
from whet.network import F32, Layer, Network, Tensor
from whet.precision.calibrate import Run
from whet.precision.sensitivity import RunOf

_SHORTEST = 4  # layers between two cuts
_FEW = 0.5  # segments of a network are cached only if at least this share differs from the base: similar networks follow then
CACHE_BYTES = 512 << 20  # cached values between segments
Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class _Segment:
    """The layers that compute the tensors `ends` from `starts`; `key` is equal for equal layers and weights."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    key: tuple[object, ...]


class SegmentedRuns:
    """`run_of` (see precision.sensitivity) for `net` and networks derived from it that keep its tensors' names.

    For other networks, for single tensors, and for networks without cuts it makes an EngineRun, which gives the same values up to rounding in
    the order of additions. Values between segments are cached for `samples` only, which must not change, in at most `cache_bytes`.
    `engine_of` makes the engine of a segment (default: an EngineRun; all of them share their parts).
    """

    def __init__(
        self,
        net: Network,
        samples: Iterable[Values] = (),
        cache_bytes: int = CACHE_BYTES,
        engine_of: RunOf | None = None,
    ):
        self.cache_bytes = cache_bytes
        self._engine_of: RunOf = engine_of if engine_of is not None else partial(EngineRun, shared=SharedParts())
        self.outputs = [t.name for t in net.outputs]
        self.cuts = find_cuts(net)
        self.own = make_segments(net, self.cuts, self.outputs) or []
        self._engines: dict[_Segment, Run] = {}
        self._samples = list(samples)  # kept alive, so that no other object gets the same id
        self.known: dict[int, list[dict[str, np.ndarray]]] = {id(f): [] for f in self._samples}  # per sample: the tensors that cross each cut
        self._bytes = 0
        self._guard = make_lock()  # samples may be run by several threads, each sample by one at a time

    def __call__(self, net: Network, names: list[str]) -> Run:
        found = make_segments(net, self.cuts, self.outputs) if self.own and names == self.outputs else None
        if found is None:
            return self._engine_of(net, names)
        same = [a == b for a, b in zip(found, self.own, strict=True)]
        others = same.count(False) > _FEW * len(same)
        engines = [self._engine(net, s, keep=own or others) for s, own in zip(found, same, strict=True)]
        return _SegmentedRun(self, engines, same.index(False) if False in same else len(same))

    def _engine(self, net: Network, s: _Segment, *, keep: bool) -> Run:
        found = self._engines.get(s) or self._engine_of(_make_network(net, s), _list_produced_names(s))
        if keep:
            self._engines[s] = found
        return found

    def read_known(self, feeds: Values, most: int) -> tuple[int, dict[str, np.ndarray]]:
        """(number of leading segments of the base network, at most `most`, cached for a sample; the values at the last cut)."""
        before = self.known.get(id(feeds), [])[:most]
        return len(before), dict(before[-1]) if before else dict(feeds)

    def keep(self, feeds: Values, cut: int, values: Mapping[str, np.ndarray]) -> None:
        """Caches the tensors that cross a cut for a sample, if those of earlier cuts are cached and there is room."""
        size, before = sum(a.nbytes for a in values.values()), self.known.get(id(feeds))
        with self._guard:
            if before is not None and len(before) == cut and self._bytes + size <= self.cache_bytes:
                self._bytes += size
                before.append(dict(values))


class _SegmentedRun:
    """One network in segments; the first `own` segments are those of the base network."""

    def __init__(self, runs: SegmentedRuns, engines: Sequence[Run], own: int):
        self.runs, self.engines, self.own = runs, engines, own

    def __call__(self, feeds: Values) -> dict[str, np.ndarray]:
        at, values = self.runs.read_known(feeds, min(self.own, len(self.runs.cuts)))
        for i in range(at, len(self.engines)):
            values.update(self.engines[i](values))
            if i < len(self.runs.cuts):
                values = {n: values[n] for n in self.runs.cuts[i]}
                if i < self.own:
                    self.runs.keep(feeds, i, values)
        return {n: values[n] for n in self.runs.outputs}


def find_cuts(net: Network) -> list[tuple[str, ...]]:
    """Names of the tensors that cross each cut; none if a region captures outer tensors (If, Loop) or the network is short."""
    layers = net.layers
    length = max(_SHORTEST, round(sqrt(len(layers))))
    if len(layers) < 2 * length or any(x.regions for x in layers):
        return []
    last: dict[Tensor, int] = {t: len(layers) for t in net.outputs}
    for i, x in enumerate(layers):
        for t in x.inputs:
            if t is not None and not t.is_constant:
                last[t] = max(last.get(t, 0), i)
    crossing: list[list[Tensor]] = []  # before each layer
    live = list(net.inputs)
    for i, x in enumerate(layers):
        live = [t for t in live if last.get(t, -1) >= i]
        crossing.append(live)
        live = [*live, *x.outputs]
    found, at = [], 0
    while at + length < len(layers):
        window = range(at + (length + 1) // 2, min(at + length + length // 2, len(layers) - 1) + 1)
        able = [p for p in window if all(t.dtype == F32 or t.maker is None for t in crossing[p])]
        if able:
            best = min(able, key=lambda p: (len(crossing[p]), abs(p - at - length)))
            found.append(tuple(t.name for t in crossing[best]))
            at = best
        else:
            at += length
    return found


def make_segments(net: Network, cuts: Sequence[tuple[str, ...]], outputs: Sequence[str]) -> list[_Segment] | None:
    """The segments of a network at the cuts; None if there are no cuts or other tensors cross them."""
    if not cuts:
        return None
    by = {t.name: t for t in net.tensors()}
    ends = [*cuts, tuple(outputs)]
    if any(n not in by for names in ends for n in names):
        return None
    starts = [tuple(t.name for t in net.inputs), *cuts]
    position = {layer: i for i, layer in enumerate(net.layers)}
    found = []
    for a, b in zip(starts, ends, strict=True):
        layers = _find_layers_between([by[n] for n in a], [by[n] for n in b if n not in a])
        if layers is None:
            return None
        found.append(_Segment(a, b, tuple(_make_key(x) for x in sorted(layers, key=position.__getitem__))))
        if not _list_produced_names(found[-1]):
            return None
    return found


def _find_layers_between(starts: Iterable[Tensor], ends: Iterable[Tensor]) -> set[Layer] | None:
    """The layers that compute `ends` from `starts`; None if they need other tensors."""
    stop, waiting, found = set(starts), list(ends), set()
    while waiting:
        t = waiting.pop()
        if t in stop or t.is_constant:
            continue
        if t.maker is None:
            return None
        if t.maker not in found:
            found.add(t.maker)
            waiting += [i for i in t.maker.inputs if i is not None]
    return found


def _make_key(layer: Layer) -> tuple[object, ...]:
    reads = tuple(None if t is None else t.weight.digest if t.weight is not None else t.name for t in layer.inputs)
    return layer.op, repr(sorted(layer.attrs.items(), key=lambda kv: kv[0])), reads, tuple(t.name for t in layer.outputs)


def _list_produced_names(s: _Segment) -> list[str]:
    return [n for n in s.ends if n not in s.starts]


def _make_network(net: Network, s: _Segment) -> Network:
    """A segment as a separate network."""
    made = net.clone()
    by, made.outputs = {t.name: t for t in made.tensors()}, []
    inputs = []
    for name in s.starts:
        t = by[name]
        if t.maker is not None:
            twin = Tensor(name, t.type)
            made.replace(t, twin)
            t = twin
        inputs.append(t)
    made.outputs = [by[n] for n in _list_produced_names(s)]
    made.prune_dead()
    read = {t for x in made.layers for t in x.inputs}
    made.inputs = [t for t in inputs if t in read]
    return made

"""Timing the options of a layer: interleaved, with caches as cold as in the network; medians and spreads are kept in the timing cache.

If launches overlap (a GPU), a chain of equal launches in a warm L2 cache is timed, and the finalists once more with cold weights (cold.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.errors import BackendError, BuildError
from whet.measure.bench import Bench
from whet.measure.cold import sample_cold_weights, select_finalists
from whet.measure.compare import LoadLog, Ranking, compare
from whet.measure.option import Option
from whet.measure.policy import LAYERS
from whet.measure.statistics import estimate_typical_time, spread
from whet.measure.timing_cache import Timed, TimingCache
from whet.measure.timing_key import make_timing_key
from whet.network import Layer

COLD = "cold weights"  # no cache holds a kernel's weights; in other states the last-level cache holds them
_COLD_WEIGHTS = "weights out of the L2 cache, method 1"
_METHOD = 5  # version of the timing method; raised when times are no longer comparable with recorded ones
_LAST_SHARE = 16 << 20  # bytes of the last-level cache for each thread: the rest is other processes', or other guests' of a virtual machine
_FAILURES = (BackendError, ValueError, IndexError, TypeError)  # of a kernel that cannot run here


@dataclass(frozen=True)
class Conditions:
    """The state of the caches before each sample: "hot", or cold: the weights are evicted, or `flush_bytes` of other memory are read.

    `l2_bytes` is the size of the cache from which finalists' weights are evicted for their cold time, 0 if there is none (a CPU).
    """

    state: str
    flush_bytes: int
    l2_bytes: int = 0

    @staticmethod
    def of(backend: Backend, footprint: int) -> Conditions:
        """The conditions of a network of which one run touches `footprint` bytes: data that fits a cache is still there in the next run.

        The last-level cache counts with at most `_LAST_SHARE` per thread: a server's cores and a virtual machine's neighbours share it. A Xeon that
        reports 480 MiB to two cores read 64 MiB again and again at 54 GB/s, but 128 MiB and more at 34, the speed of its memory.
        """
        if backend.capabilities.cold_cache_clock:
            return Conditions("hot, in a row", 0, backend.capabilities.cache_bytes[2])
        caches = backend.capabilities.cache_bytes
        second, last = caches.get(2, 0), max(caches.values(), default=0)
        if not backend.capabilities.executes or footprint <= second or not last:
            return Conditions("hot", 0)
        share = min(last, _LAST_SHARE * backend.threads)
        if footprint <= share:
            return Conditions("cold L2", 2 * second)
        return Conditions(COLD, share + share // 2)


@dataclass
class Timer:
    """Times options on a backend, with a cache of times."""

    backend: Backend
    cache: TimingCache
    conditions: Conditions
    rounds: int = 8
    error_on_miss: bool = False
    loads: LoadLog = field(default_factory=LoadLog)
    timed: int = 0
    cold_timed: int = 0
    cold_s: float = 0.0  # seconds spent on times with cold weights
    _flush: np.ndarray | None = None
    _buffers: dict[tuple, Any] = field(default_factory=dict)
    _filler: Any = None
    _bench: Bench | None = None  # of the layer timed last, for its finalists

    def __post_init__(self) -> None:
        self._machine_key = self.backend.key()

    @property
    def flush_bytes(self) -> int:
        """Bytes read before each sample to flush the caches; 0 if caches stay hot."""
        return self.conditions.flush_bytes

    @property
    def environment(self) -> tuple[str, str]:
        """The machine and the state of its caches: all that times depend on, except the work itself."""
        return self._machine_key, self.conditions.state

    def key(self, option: Option, text: str, *, cold: bool = False) -> str:
        state = _COLD_WEIGHTS if cold else f"{self.conditions.state}, method {_METHOD}"
        return make_timing_key(option.tactic, text, option.signature, option.config, self._machine_key, state)

    def read_cache(self, options: Sequence[Option], text: str) -> list[Option]:
        """Sets the cached times; returns the options without one."""
        missing = []
        for o in options:
            found = self.cache.get(self.key(o, text))
            if found is None:
                missing.append(o)
            else:
                o.ms, o.spread_ms = found.ms, found.spread_ms
        return missing

    def is_cached(self, options: Sequence[Option], text: str) -> bool:
        """True if the cache has the times of all options; then sets them. Counts neither hits nor misses."""
        options = _set_view_times(options)
        times = [self.cache.peek(self.key(o, text)) for o in options]
        known = [t for t in times if t is not None]
        if len(known) < len(times):
            return False
        for o, timed in zip(options, known, strict=True):
            o.ms, o.spread_ms = timed.ms, timed.spread_ms
        return True

    def time(self, layer: Layer, text: str, options: Sequence[Option], *, keep: bool = False, remeasure: bool = False) -> None:
        """Times options that the cache lacks; sets `ms` and `spread_ms`. An option that fails gets a note and no time.

        When one of a layer's options is missing, all are timed again together, since only times of the same moment are compared. `remeasure` times
        all of them regardless of the cache. `keep` keeps operands and weights in memory for `time_cold`. Views take no time and are not timed.
        Raises BuildError under `error_on_miss`.
        """
        options = _set_view_times(options)
        missing = list(options) if remeasure else self.read_cache(options, text)
        if not missing:
            return
        if self.error_on_miss:
            raise _make_missing_time_error(layer, missing[0])
        self._bench = Bench(self, layer)
        timed, ranking = self._compare(self._bench, options)
        with self.cache.transaction():
            for i, o in enumerate(timed):
                if ranking.samples[i]:
                    o.ms, o.spread_ms = ranking.seconds(i) * 1e3, ranking.spread(i) * 1e3
                    self.cache.put(self.key(o, text), Timed(o.ms, o.spread_ms, len(ranking.samples[i])), _describe(o, text))
                    self.timed += 1
        if not keep:
            self._bench = None

    def _compare(self, bench: Bench, options: Sequence[Option]) -> tuple[list[Option], Ranking]:
        """The options that can be prepared, and their comparison."""
        ready: list[tuple[Option, Any, int]] = []
        for o in options:
            try:
                ready.append((o, *bench.prepare(o)))
            except _FAILURES as error:
                o.note = f"could not be timed: {error}"

        def run_in_order(order: Sequence[int]) -> list[float]:
            seconds = self.backend.seconds_in_row([ready[i][1] for i in order])
            return [s / ready[i][2] for i, s in zip(order, seconds, strict=True)]

        ranking = compare(
            [partial(self._run, bench, *each) for each in ready],
            LAYERS.with_rounds(self.rounds if self.backend.capabilities.executes else 1),
            run_in_order=None if self.flush_bytes else run_in_order,
            watch=self.backend.watch,
            loads=self.loads,
            catch=_FAILURES,
        )
        for i, failure in ranking.failures.items():
            ready[i][0].note = f"could not be timed: {failure}"
        return [o for o, *_ in ready], ranking

    def _run(self, bench: Bench, o: Option, executable: Any, count: int) -> float:
        """Seconds of one launch of an executable that holds `count`, with the caches as the network leaves them."""
        bench.prepare_caches(o)
        return float(self.backend.seconds(executable, 1)[0]) / count

    def time_cold(self, layer: Layer, text: str, options: Sequence[Option]) -> None:
        """Times the finalists among the timed options of a layer with cold weights too; sets their `cold_ms` and `cold_spread_ms`, and `rank_ms`
        of all options: the cold time, else the warm time plus the least that cold weights cost a finalist. Does nothing if the machine has
        no such cache. Raises BuildError under `error_on_miss`.

        If the timing cache has only warm times, they are kept and only the cold ones are measured.
        """
        bench, self._bench = self._bench, None
        near = select_finalists(layer, options) if self.conditions.l2_bytes else []
        if not near:
            return
        known = [self.cache.get(self.key(o, text, cold=True)) for o in near]
        if None not in known:
            for o, timed in zip(near, filter(None, known), strict=True):
                o.cold_ms, o.cold_spread_ms = timed.ms, timed.spread_ms
        elif self.error_on_miss:
            raise _make_missing_time_error(layer, near[known.index(None)])
        else:
            self._time_finalists(bench if bench is not None and bench.layer is layer else Bench(self, layer), text, near)
        extra = [o.cold_ms - o.ms for o in near if o.cold_ms is not None and o.ms is not None]
        for o in options:
            if o.ms is not None and extra:
                o.rank_ms = o.ms + min(extra) if o.cold_ms is None else o.cold_ms

    def _time_finalists(self, bench: Bench, text: str, near: Sequence[Option]) -> None:
        """Times finalists with cold weights and caches the times; if the GPU has too little memory for it they get none."""
        start = perf_counter()
        try:
            samples = sample_cold_weights(bench, near, self.rounds, self.conditions.l2_bytes)
        except BackendError as e:
            for o in near:
                o.note = o.note or f"not timed with a cold L2 cache: {e}"
            return
        with self.cache.transaction():
            for o in near:
                if got := samples.get(o.rank):
                    o.cold_ms, o.cold_spread_ms = estimate_typical_time(got), spread(got)
                    timed = Timed(o.cold_ms, o.cold_spread_ms, len(got))
                    self.cache.put(self.key(o, text, cold=True), timed, {**_describe(o, text), "cache": _COLD_WEIGHTS})
                    self.cold_timed += 1
        self.cold_s += perf_counter() - start

    def cold_report(self) -> dict[str, Any]:
        """How many options were timed with cold weights in this build, in how many seconds; empty if the backend has no cold times."""
        if not self.conditions.l2_bytes:
            return {}
        return {"cold_timed": self.cold_timed, "cold_seconds": round(self.cold_s, 3)}

    def allocate_filler(self, nbytes: int) -> Any:
        """Memory of that size that no kernel uses: writing it flushes the cache."""
        if self._filler is None or self._filler.nbytes < nbytes:
            self._filler = self.backend.allocate(nbytes)
        return self._filler

    def borrow(self, key: tuple, nbytes: int) -> Any:
        """Memory of at least so many bytes. Host memory is reused for the same key if it is large enough: the first touch of a page takes
        longer than most kernels."""
        found = self._buffers.get(key)
        if found is None or found.nbytes < nbytes:
            found = self.backend.allocate(max(nbytes, 64))
            if found.array is not None:
                self._buffers[key] = found
        return found

    def flush(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Evicts memory (addresses and bytes) from the caches, or reads so much other memory that it is evicted."""
        if not self.conditions.flush_bytes or (self.conditions.state == COLD and self.backend.evict(pieces)):
            return
        if self._flush is None:
            self._flush = np.ones(self.conditions.flush_bytes, np.uint8)
        self.backend.warm(self._flush)


def _set_view_times(options: Sequence[Option]) -> list[Option]:
    """Sets the times of views to zero; returns the other options.

    A view launches nothing, so a measured time would be that of the host between two launches. It may be longer than a reformat, and a view that
    leads a comparison would drop the kernels and scale their times by the host's noise.
    """
    for o in options:
        if o.is_view:
            o.ms, o.spread_ms = 0.0, 0.0
    return [o for o in options if not o.is_view]


def _make_missing_time_error(layer: Layer, o: Option) -> BuildError:
    return BuildError(
        f"'{layer.name}' by {o.tactic.name} {o.signature} is not in the timing cache, and --errorOnTimingCacheMiss forbids "
        "timing it. Build once without that flag on this machine."
    )


def _describe(o: Option, text: str) -> dict[str, str]:
    """The human-readable description of a row of the cache."""
    return {"tactic": o.tactic.name, "signature": str(o.signature), "layer": text, "implementation": o.kernel.implementation}


def select_fastest(options: Sequence[Option]) -> Option:
    """The first-listed of the options that do not differ significantly from the fastest."""
    best = min(options, key=lambda o: o.cost)
    for o in sorted(options, key=lambda o: o.rank):
        if o.cost - best.cost <= LAYERS.tolerance(best.cost, max(o.noise_ms, best.noise_ms)):
            return o
    return best

"""Timing candidates: all of a layer take turns, caches are as cold as the network leaves them, medians and spread are kept.

Where launches overlap (a GPU), that is a chain of equal launches in a warm L2 cache, and the finalists once more with cold weights (cold.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.candidates.option import Option
from whet.errors import BackendError, BuildError
from whet.measure.bench import Bench
from whet.measure.cold import cold_samples, finalists
from whet.measure.statistics import spread, typical
from whet.measure.timing_cache import Timed, TimingCache
from whet.measure.timing_key import timing_key
from whet.network import Layer

COLD = "cold"  # nothing in any cache but what the layer before has written; otherwise the last one holds more
_COLD = "weights out of the L2 cache, method 1"
_METHOD = 4  # of timing; raise it when times of another kind come out, so that old ones are not compared with new ones
_HOPELESS = (4.0, 4.0, 1.5, 1.2)  # after each round: a candidate this much slower than the best is not timed again; the last one stays
_LONG_MS = 1.0  # from here on a run says more: what disturbs one for microseconds does not show
_HOPELESS_LONG = (2.0, 1.3, 1.2)
_HOPELESS_FIRST = 4.0  # the same after the run that does not count, for long ones
_ABSURD_MS, _ABSURD = 20.0, 20.0  # a run this long, times the best: no disturbance does that, so one says enough (loops of a library for reference)
_OPTION_MS = 20.0  # that the best of a layer's options is timed for, in all rounds
_FEWEST = 3  # rounds, however long they take
_PATIENCE = 6  # disturbed measurements that are repeated in one build; on a machine that never rests more would not help


@dataclass(frozen=True)
class Conditions:
    """How caches are left before each sample: "hot", or cold: what a kernel reads and writes is taken out, or `flush_bytes` of other memory are read.

    `l2_bytes` is the size of the cache out of which finalists' weights are taken for a second time, 0 where there is none (a CPU).
    """

    state: str
    flush_bytes: int
    l2_bytes: int = 0

    @staticmethod
    def of(backend: Backend, footprint: int) -> Conditions:
        """From the bytes that one run of the network touches: what fits a cache is found there again, what does not is not."""
        if backend.capabilities.cold_cache_clock:
            return Conditions("hot, in a row", 0, backend.capabilities.cache_bytes[2])
        caches = backend.capabilities.cache_bytes
        second, last = caches.get(2, 0), max(caches.values(), default=0)
        if not backend.capabilities.executes or footprint <= second or not last:
            return Conditions("hot", 0)
        if footprint <= last:
            return Conditions("cold L2", 2 * second)
        return Conditions(COLD, last + last // 2)


@dataclass
class Timer:
    """Times options on a machine, with a cache. `disturbed` collects what others took of the CPUs (the machine's Load), where it was much."""

    backend: Backend
    cache: TimingCache
    conditions: Conditions
    rounds: int = 8
    error_on_miss: bool = False
    disturbed: list[Any] = field(default_factory=list)
    timed: int = 0
    cold_timed: int = 0
    cold_s: float = 0.0  # spent on times with cold weights
    _flush: np.ndarray | None = None
    _spare: dict[tuple, Any] = field(default_factory=dict)
    _other: Any = None
    _bench: Bench | None = None  # of the layer timed last, for its finalists

    def __post_init__(self) -> None:
        self._machine_key = self.backend.key()

    @property
    def patient(self) -> bool:
        """Whether a disturbed measurement is still worth repeating."""
        return len(self.disturbed) <= _PATIENCE

    @property
    def flush_bytes(self) -> int:
        """Bytes that are walked over before each sample; 0 where caches stay hot."""
        return self.conditions.flush_bytes

    @property
    def about(self) -> tuple[str, str]:
        """The machine and the state of its caches: what every time depends on beside the work itself."""
        return self._machine_key, self.conditions.state

    def key(self, option: Option, text: str, *, cold: bool = False) -> str:
        state = _COLD if cold else f"{self.conditions.state}, method {_METHOD}"
        return timing_key(option.tactic, text, option.signature, option.config, self._machine_key, state)

    def recall(self, options: Sequence[Option], text: str) -> list[Option]:
        """Fills in what the cache knows; returns the options that it does not."""
        missing = []
        for o in options:
            found = self.cache.get(self.key(o, text))
            if found is None:
                missing.append(o)
            else:
                o.ms, o.spread_ms = found.ms, found.spread_ms
        return missing

    def knows(self, options: Sequence[Option], text: str) -> bool:
        """Whether the cache knows the times of all options; then they are filled in. Counts neither hits nor misses."""
        found = [self.cache.peek(self.key(o, text)) for o in options]
        if None in found:
            return False
        for o, timed in zip(options, found, strict=True):
            o.ms, o.spread_ms = timed.ms, timed.spread_ms  # type: ignore[union-attr]
        return True

    def time(self, layer: Layer, text: str, options: Sequence[Option], *, keep: bool = False) -> None:
        """Times what the cache does not know; sets `ms` and `spread_ms`. An option that fails gets a note and no time.

        When one of a layer's options is missing, all are timed again together: times of one moment are compared with each other.
        `keep` leaves operands and weights where they are, for `time_cold`.
        Raises BuildError under `error_on_miss`.
        """
        missing = self.recall(options, text)
        if not missing:
            return
        if self.error_on_miss:
            raise _missed(layer, missing[0])
        self._bench = Bench(self, layer)
        samples: dict[int, list[float]] = {}
        again = list(options)
        while True:
            with self.backend.watch() as load:
                fresh = _take_turns(self, self._bench, again)
            disturbed = load is not None and load.disturbed
            settled = {k: v for k, v in samples.items() if k not in {o.rank for o in again}}
            samples = settled | ({k: samples.get(k, []) + v for k, v in fresh.items()} if disturbed else fresh)
            again = _without_absurd(options, samples)
            if load is None or not disturbed:
                break
            self.disturbed.append(load)
            if not self.patient:
                break
        with self.cache.together():
            for o in options:
                got = samples.get(o.rank)
                if not got:
                    continue
                o.ms, o.spread_ms = typical(got, disturbed), spread(got)
                self.cache.put(self.key(o, text), Timed(o.ms, o.spread_ms, len(got)), _about(o, text))
                self.timed += 1
        if not keep:
            self._bench = None

    def time_cold(self, layer: Layer, text: str, options: Sequence[Option]) -> None:
        """Times the finalists among the timed options of a layer with cold weights too, in turns; sets `cold_ms` and `cold_spread_ms`, and
        `rank_ms` of all: this time, or where there is none what weights cost at least. Nothing where the machine has no such cache. Raises
        BuildError under `error_on_miss`.

        A timing cache of a time when there was no such number misses it, keeps the warm one, and only this is timed.
        """
        bench, self._bench = self._bench, None
        near = finalists(layer, options) if self.conditions.l2_bytes else []
        if not near:
            return
        known = [self.cache.get(self.key(o, text, cold=True)) for o in near]
        if None not in known:
            for o, timed in zip(near, filter(None, known), strict=True):
                o.cold_ms, o.cold_spread_ms = timed.ms, timed.spread_ms
        elif self.error_on_miss:
            raise _missed(layer, near[known.index(None)])
        else:
            self._take_cold(bench if bench is not None and bench.layer is layer else Bench(self, layer), text, near)
        extra = [o.cold_ms - o.ms for o in near if o.cold_ms is not None and o.ms is not None]
        for o in options:
            if o.ms is not None and extra:
                o.rank_ms = o.ms + min(extra) if o.cold_ms is None else o.cold_ms

    def _take_cold(self, bench: Bench, text: str, near: Sequence[Option]) -> None:
        """Measures finalists with cold weights and remembers what came out; a GPU without the memory for it leaves them without."""
        begun = perf_counter()
        try:
            samples = cold_samples(bench, near, self.rounds, self.conditions.l2_bytes)
        except BackendError as e:
            for o in near:
                o.note = o.note or f"not timed with a cold L2 cache: {e}"
            return
        with self.cache.together():
            for o in near:
                if got := samples.get(o.rank):
                    o.cold_ms, o.cold_spread_ms = typical(got, False), spread(got)
                    timed = Timed(o.cold_ms, o.cold_spread_ms, len(got))
                    self.cache.put(self.key(o, text, cold=True), timed, {**_about(o, text), "cache": _COLD})
                    self.cold_timed += 1
        self.cold_s += perf_counter() - begun

    def cold_report(self) -> dict[str, Any]:
        """How many options were timed with cold weights in this build and what that took; nothing where none can be."""
        if not self.conditions.l2_bytes:
            return {}
        return {"cold_timed": self.cold_timed, "cold_seconds": round(self.cold_s, 3)}

    def other(self, nbytes: int) -> Any:
        """Memory of that size that nothing else uses: written, it takes the cache."""
        if self._other is None or self._other.nbytes < nbytes:
            self._other = self.backend.allocate(nbytes)
        return self._other

    def lend(self, key: tuple, nbytes: int) -> Any:
        """Memory of at least so many bytes, the same for the same key where it is the host's and large enough: to touch fresh pages takes
        longer than most kernels run."""
        found = self._spare.get(key)
        if found is None or found.nbytes < nbytes:
            found = self.backend.allocate(max(nbytes, 64))
            if found.array is not None:
                self._spare[key] = found
        return found

    def chilled(self, bench: Bench, o: Option, executable: Any) -> float:
        """Seconds of one run with the caches as the network leaves them."""
        bench.chill(o)
        return float(self.backend.seconds(executable, 1)[0])

    def flush(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Takes memory (addresses and bytes) out of the caches, or walks over so much other memory that what was in them is gone."""
        if not self.conditions.flush_bytes or (self.conditions.state == COLD and self.backend.evict(pieces)):
            return
        if self._flush is None:
            self._flush = np.ones(self.conditions.flush_bytes, np.uint8)
        self.backend.warm(self._flush)


def _missed(layer: Layer, o: Option) -> BuildError:
    return BuildError(
        f"'{layer.name}' by {o.tactic.name} {o.signature} is not in the timing cache, and --errorOnTimingCacheMiss forbids "
        "timing it. Build once without that flag on this machine."
    )


def _about(o: Option, text: str) -> dict[str, str]:
    """What a row of the cache says to people who look into it."""
    return {"tactic": o.tactic.name, "signature": str(o.signature), "layer": text, "implementation": o.kernel.implementation}


def _take_turns(timer: Timer, bench: Bench, options: list[Option]) -> dict[int, list[float]]:
    """Samples in ms per option rank; of options that left, as they would be when the best one's were complete (racing.py says why)."""
    samples: dict[int, list[float]] = {}
    left: dict[int, float] = {}  # by rank: how many times the best one's time its own typical sample took, over that sample
    alive: list[tuple[Option, Any, int]] = []
    best = float("inf")
    for o in options:
        try:
            executable, count = bench.prepare(o)
            first = timer.backend.seconds(executable, 1)[0] * 1e3 / count
        except (BackendError, ValueError, IndexError, TypeError) as e:
            o.note = f"could not be timed: {e}"
            continue
        samples[o.rank] = [first]
        best = min(best, first)
        alive.append((o, executable, count))
    if best >= _LONG_MS:
        alive = [a for a in alive if samples[a[0].rank][0] <= _HOPELESS_FIRST * best]
    elif not timer.backend.capabilities.overlapping_launches:  # a GPU loads kernels when they are launched first
        alive = [a for a in alive if samples[a[0].rank][0] <= max(_ABSURD_MS, _ABSURD * best)]
    rounds = timer.rounds if timer.backend.capabilities.executes else 1
    for r in range(rounds):
        order = alive if r % 2 == 0 else alive[::-1]
        if timer.conditions.flush_bytes:
            taken = [timer.chilled(bench, o, executable) for o, executable, _ in order]
        else:
            taken = timer.backend.seconds_in_row([executable for _, executable, _ in order])
        for (o, _, count), seconds in zip(order, taken, strict=True):
            if r == 0:
                samples[o.rank] = []  # the run before only warmed up
            samples[o.rank].append(seconds * 1e3 / count)
        best = min((typical(samples[o.rank], True) for o, _, _ in alive), default=best)
        factors = _HOPELESS_LONG if best >= _LONG_MS else _HOPELESS
        factor = factors[min(r, len(factors) - 1)]
        quick = {o.rank: typical(samples[o.rank], True) for o, _, _ in alive}
        left |= {rank: ms / best / median(samples[rank]) for rank, ms in quick.items() if ms > factor * best > 0}
        alive = [a for a in alive if quick[a[0].rank] <= factor * best]
        if r + 1 >= _FEWEST and (r + 1) * best >= _OPTION_MS:
            break
    end = min((median(samples[o.rank]) for o, _, _ in alive), default=best)
    return {rank: [s * left[rank] * end for s in got] if rank in left else got for rank, got in samples.items()}


def _without_absurd(options: Sequence[Option], samples: dict[int, list[float]]) -> list[Option]:
    """The options that a repeated measurement may still find to be the best."""
    least = {rank: min(got) for rank, got in samples.items() if got}
    most = max(_ABSURD_MS, _ABSURD * min(least.values(), default=0.0))
    return [o for o in options if least.get(o.rank, 0.0) <= most]


def earliest_in_noise(options: Sequence[Option]) -> Option:
    """The first-listed of the options whose time cannot be told from the best one's."""
    best = min(options, key=lambda o: o.cost)
    for o in sorted(options, key=lambda o: o.rank):
        if o.cost - best.cost <= max(o.noise_ms, best.noise_ms, 0.005 * best.cost):
            return o
    return best

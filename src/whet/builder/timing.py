"""Timing candidates: all of a layer take turns, caches are as cold as the network leaves them, medians and spread are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from whet.builder.candidates import Option
from whet.builder.key import timing_key
from whet.builder.timing_cache import Timed, TimingCache
from whet.errors import BackendError, BuildError
from whet.network import DType, Layer
from whet.runtime.memory import write_bytes
from whet.tactics import Args, Packed

_METHOD = 2  # of timing; raise it when times of another kind come out, so that old ones are not compared with new ones
_HOPELESS = (4.0, 4.0, 1.5, 1.2)  # after each round: a candidate this much slower than the best is not timed again; the last one stays
_LONG_MS = 1.0  # from here on a run says more: what disturbs one for microseconds does not show
_HOPELESS_LONG = (2.0, 1.3, 1.2)
_HOPELESS_FIRST = 4.0  # the same after the run that does not count, for long ones
_OPTION_MS = 20.0  # that the best of a layer's options is timed for, in all rounds
_FEWEST = 3  # rounds, however long they take
_HOT_SAMPLE_MS = 0.05  # in hot caches, short kernels are repeated within one sample up to this
_PATIENCE = 6  # disturbed measurements that are repeated in one build; on a machine that never rests more would not help


@dataclass(frozen=True)
class Conditions:
    """How caches are left before each sample: "hot", or cold after walking over `flush_bytes`."""

    state: str
    flush_bytes: int

    @staticmethod
    def of(machine: Any, footprint: int) -> Conditions:
        """From the bytes that one run of the network touches: what fits a cache is found there again, what does not is not."""
        caches = getattr(machine, "cache_bytes", {})
        second, last = caches.get(2, 0), max(caches.values(), default=0)
        if not getattr(machine, "runs", True) or footprint <= second or not last:
            return Conditions("hot", 0)
        if footprint <= last:
            return Conditions("cold L2", 2 * second)
        return Conditions("cold", last + last // 2)


@dataclass
class Timer:
    """Times options on a machine, with a cache. `disturbed` collects what share of a CPU others took, where it was much."""

    machine: Any
    cache: TimingCache
    conditions: Conditions
    rounds: int = 8
    error_on_miss: bool = False
    disturbed: list[float] = field(default_factory=list)
    timed: int = 0
    _flush: np.ndarray | None = None
    _spare: dict[tuple, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._machine_key = self.machine.key()

    @property
    def patient(self) -> bool:
        """Whether a disturbed measurement is still worth repeating."""
        return len(self.disturbed) <= _PATIENCE

    @property
    def about(self) -> tuple[str, str]:
        """The machine and the state of its caches: what every time depends on beside the work itself."""
        return self._machine_key, self.conditions.state

    def key(self, option: Option, text: str) -> str:
        state = f"{self.conditions.state}, method {_METHOD}"
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

    def time(self, layer: Layer, text: str, options: Sequence[Option]) -> None:
        """Times what the cache does not know; sets `ms` and `spread_ms`. An option that fails gets a note and no time.

        When one of a layer's options is missing, all are timed again together: times of one moment are compared with each other.
        Raises BuildError under `error_on_miss`.
        """
        missing = self.recall(options, text)
        if not missing:
            return
        if self.error_on_miss:
            o = missing[0]
            raise BuildError(
                f"'{layer.name}' by {o.tactic.name} {o.signature} is not in the timing cache, and --errorOnTimingCacheMiss forbids "
                "timing it. Build once without that flag on this machine."
            )
        samples: dict[int, list[float]] = {}
        while True:
            with self.machine.watch() if hasattr(self.machine, "watch") else nullcontext() as load:
                fresh = _take_turns(self, layer, list(options))
            disturbed = load is not None and load.disturbed
            samples = {k: samples.get(k, []) + v for k, v in fresh.items()} if disturbed else fresh
            if load is None or not disturbed:
                break
            self.disturbed.append(load.others)
            if not self.patient:
                break
        with self.cache.together():
            for o in options:
                got = samples.get(o.rank)
                if not got:
                    continue
                o.ms, o.spread_ms = typical(got, disturbed), _spread(got)
                about = {"tactic": o.tactic.name, "signature": str(o.signature), "layer": text, "implementation": o.kernel.implementation}
                self.cache.put(self.key(o, text), Timed(o.ms, o.spread_ms, len(got)), about)
                self.timed += 1

    def lend(self, key: tuple, nbytes: int) -> Any:
        """Memory of at least so many bytes, the same for the same key where it is the host's and large enough: to touch fresh pages takes
        longer than most kernels run."""
        found = self._spare.get(key)
        if found is None or found.nbytes < nbytes:
            found = self.machine.allocate(max(nbytes, 64))
            if found.array is not None:
                self._spare[key] = found
        return found

    def flush(self) -> None:
        """Walks over memory until what was in the caches is gone."""
        if not self.conditions.flush_bytes:
            return
        if self._flush is None:
            self._flush = np.ones(self.conditions.flush_bytes // 8, np.int64)
        self._flush.max()


def _take_turns(timer: Timer, layer: Layer, options: list[Option]) -> dict[int, list[float]]:
    """Samples in ms per option rank."""
    bench = _Bench(timer, layer)
    samples: dict[int, list[float]] = {}
    alive: list[tuple[Option, Any, int]] = []
    best = float("inf")
    for o in options:
        try:
            executable, count = bench.prepare(o)
            first = timer.machine.seconds(executable, 1)[0] * 1e3 / count
        except (BackendError, ValueError, IndexError, TypeError) as e:
            o.note = f"could not be timed: {e}"
            continue
        samples[o.rank] = [first]
        best = min(best, first)
        alive.append((o, executable, count))
    if best >= _LONG_MS:
        alive = [a for a in alive if samples[a[0].rank][0] <= _HOPELESS_FIRST * best]
    rounds = timer.rounds if getattr(timer.machine, "runs", True) else 1
    for r in range(rounds):
        order = alive if r % 2 == 0 else alive[::-1]
        for o, executable, count in order:
            bench.chill(o)
            ms = timer.machine.seconds(executable, 1)[0] * 1e3 / count
            if r == 0:
                samples[o.rank] = []  # the run before only warmed up
            samples[o.rank].append(ms)
        best = min((typical(samples[o.rank], True) for o, _, _ in alive), default=best)
        factors = _HOPELESS_LONG if best >= _LONG_MS else _HOPELESS
        factor = factors[min(r, len(factors) - 1)]
        alive = [a for a in alive if typical(samples[a[0].rank], True) <= factor * best]
        if r + 1 >= _FEWEST and (r + 1) * best >= _OPTION_MS:
            break
    return samples


class _Bench:
    """Buffers that a layer's options share while they are timed: operands hold normal numbers, or zeros where they are integers."""

    def __init__(self, timer: Timer, layer: Layer):
        self.timer, self.layer = timer, layer
        self.buffers: dict[tuple, Any] = {}
        self._used: dict[tuple, int] = {}  # bytes of each that operands take
        self._packed: dict[str, Any] = {}
        self.held: list[Any] = []

    def prepare(self, o: Option) -> tuple[Any, int]:
        """An executable for the option and how many launches it holds."""
        ins = [
            0 if operand is None else self._buffer("in", i, operand.dtype, nbytes).address
            for i, (operand, nbytes) in enumerate(zip(o.signature.inputs, o.kernel.inputs, strict=True))
        ]
        outs = [self._buffer("out", i, operand.dtype, o.kernel.outputs[i]).address for i, operand in enumerate(o.signature.outputs)]
        for (i, j), shift in zip(o.signature.inplace, getattr(o.kernel, "shifts", ()) or (0,) * len(o.signature.inplace), strict=True):
            if o.kernel.inputs[i] < o.kernel.outputs[j]:
                ins[i] = outs[j] + shift
            else:
                outs[j] = ins[i] + shift
        packed = tuple(self._weight(p) for p in o.kernel.packed)
        scratch = self._buffer("scratch", 0, None, o.kernel.scratch).address if o.kernel.scratch else 0
        args = Args(tuple(ins), tuple(outs), packed, scratch)
        executable = self._record(o, args, 1)
        if self.timer.conditions.flush_bytes or not getattr(self.timer.machine, "runs", True):
            return executable, 1
        once = min(self.timer.machine.seconds(executable, 3)) * 1e3
        count = max(1, min(64, int(_HOT_SAMPLE_MS / max(once, 1e-4))))
        return (executable, 1) if count == 1 else (self._record(o, args, count), count)

    def _record(self, o: Option, args: Args, count: int) -> Any:
        stream = self.timer.machine.stream()
        o.kernel.enqueue(args, stream)
        calls = list(stream.calls) if getattr(self.timer.machine, "overlaps", False) else None
        for _ in range(count - 1):
            if calls is None:
                o.kernel.enqueue(args, stream)
            else:  # a graph takes the same launches again; making them anew would take longer than they run
                for call in calls:
                    stream.record(call)
        return stream.finish()

    def chill(self, o: Option) -> None:
        """Leaves the caches as the network would: cold, but for the inputs, which the layer before has just written. Operands that no cache
        holds need none of it: the run before has left nothing else there."""
        k, flushed = o.kernel, self.timer.conditions.flush_bytes
        if not flushed or sum(k.inputs) + sum(k.outputs) >= flushed:
            return
        self.timer.flush()
        for i, operand in enumerate(o.signature.inputs):
            if operand is not None:
                array = self.buffers["in", i, operand.dtype].array
                if array is not None:
                    array[: k.inputs[i] : 64].max(initial=0)

    def _buffer(self, kind: str, i: int, dtype: DType | None, nbytes: int) -> Any:
        key = (kind, i, dtype)
        found = self.buffers.get(key)
        if found is None or self._used[key] < nbytes:
            self.held.append(found)  # earlier options point at it
            found, self._used[key] = self.timer.lend(key, nbytes), nbytes
            self.buffers[key] = found
            if kind == "in" and dtype is not None and getattr(self.timer.machine, "runs", True):
                raw = np.zeros(found.nbytes, np.uint8) if found.array is None else found.array[:nbytes]
                fill(raw, dtype)
                if found.array is None:
                    write_bytes(self.timer.machine, found, 0, raw)
        return found

    def _weight(self, p: Packed) -> int:
        if p.key not in self._packed:
            buffer = self.timer.machine.allocate(max(p.nbytes, 64))
            if getattr(self.timer.machine, "runs", True):
                write_bytes(self.timer.machine, buffer, 0, p.make())
            self._packed[p.key] = buffer
        return self._packed[p.key].address


def fill(raw: np.ndarray, dtype: DType) -> None:
    """Fills bytes with values of a type: normal numbers for floats, zeros for the rest (valid as indices and flags)."""
    if not dtype.is_float:
        raw[:] = 0
        return
    count = raw.nbytes // dtype.numpy.itemsize
    block = np.random.default_rng(1).standard_normal(min(count, 1 << 16)).astype(dtype.numpy)
    view = raw[: count * dtype.numpy.itemsize].view(dtype.numpy)
    for at in range(0, count, block.size):
        view[at : at + block.size] = block[: count - at]


def typical(samples: Sequence[float], disturbed: bool) -> float:
    """The median; where other programs took the CPUs, the lower quartile: a sample that was interrupted says nothing about the kernel."""
    return sorted(samples)[(len(samples) - 1) // 4] if disturbed else median(samples)


def _spread(samples: list[float]) -> float:
    """Half the distance between the quartiles: what the middle of the samples varies by."""
    s = sorted(samples)
    return (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2


def earliest_in_noise(options: Sequence[Option]) -> Option:
    """The first-listed of the options whose time cannot be told from the best one's."""
    best = min(options, key=lambda o: o.cost)
    for o in sorted(options, key=lambda o: o.rank):
        if o.cost - best.cost <= max(o.spread_ms, best.spread_ms, 0.005 * best.cost):
            return o
    return best

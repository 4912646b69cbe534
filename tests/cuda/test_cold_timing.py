"""Finalists timed with cold weights, on a simulated GPU with a cache and on a real one."""

import sqlite3
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.standin_gpu import LAUNCH_S, StandInCall, StandInGpu
from whet.builder import BuildConfig, build
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.precision.permissions import Permissions
from whet.errors import BackendError, BuildError
from whet.inspector import explain
from whet.measure import timing
from whet.measure.bench import Bench
from whet.measure.cold import Copies, count_weight_bytes, sample_cold_weights, select_finalists
from whet.measure.policy import COLD_FINALIST, COLD_FINALISTS
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache
from whet.network import F16, Layer, Network, parse_network, parse_type
from whet.tactics.cuda._device.kernel import GpuKernel

NET = """network block source
in %x: f32[1,64,14,14]
const %w0: f32[256,64,3,3] = seed(1)
const %w1: f32[64,256,1,1] = seed(2)
%a = Conv(%x, %w0, pads=(1, 1, 1, 1)) from "first"
%b = Relu(%a) from "first_relu"
%c = Conv(%b, %w1) from "second"
%d = MaxPool(%c, kernel_shape=(2, 2), strides=(2, 2)) from "pool"
%y = Sigmoid(%d) from "sigmoid"
out %y
"""
L2 = 1 << 20
HOST_S = 5e-6  # host latency of a single launch
FAST, SLOW = 1e11, 1e10  # bytes per second of weights read from the cache and from memory


class ReadingCall(StandInCall):
    """A launch that takes `seconds` plus the time to read its weights."""

    def __init__(self, seconds: float, reads: list[tuple[int, int]]):
        self.cost, self.reads = seconds, reads

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Costs the same elsewhere."""


class CachedGpu(StandInGpu):
    """A simulated GPU with an L2 cache for weights only, least recently used evicted first. Its clock includes the host's launch latency."""

    capabilities = replace(StandInGpu.capabilities, overlapping_launches=True, cold_cache_clock=True, cache_bytes={2: L2})
    cached: OrderedDict[int, int]
    cold_runs: list

    def seconds(self, executable, repeats: int) -> list[float]:
        return [HOST_S + self._took(executable) for _ in range(repeats)]

    def seconds_in_row(self, executables) -> list[float]:
        return [self._took(e) for e in (executables[0], *executables)][1:]

    def cold_seconds(self, executable, before, other) -> float:
        assert other.nbytes >= 2 * L2
        self.cold_runs.append(executable)
        self.cached.clear()
        if before is not None:
            self._took(before)
        return self._took(executable)

    def _took(self, executable) -> float:
        return sum(c.cost + sum(self._read(*r) for r in c.reads) for c in executable.calls)

    def _read(self, address: int, nbytes: int) -> float:
        known = self.cached.pop(address, 0) == nbytes
        self.cached[address] = nbytes
        while sum(self.cached.values()) > L2:
            self.cached.popitem(last=False)
        return nbytes / (FAST if known else SLOW)


@pytest.fixture
def gpu(monkeypatch, standin_gpu):
    """The simulated GPU with a cache; times of kernels differ slightly by name."""
    from whet.backends import BACKENDS

    def enqueue(self, args, stream):
        reads = [(at, p.nbytes) for at, p in zip(args.packed, self.packed, strict=True)]
        stream.record(ReadingCall(LAUNCH_S * (1 + sum(map(ord, self.implementation)) % 7 / 100), reads))

    monkeypatch.setattr(GpuKernel, "enqueue", enqueue)
    monkeypatch.setattr(CachedGpu, "cached", OrderedDict(), raising=False)
    monkeypatch.setattr(CachedGpu, "cold_runs", [], raising=False)
    monkeypatch.setitem(BACKENDS, "cuda", CachedGpu)
    return CachedGpu


@pytest.fixture
def config(tmp_path):
    return BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=str(tmp_path / "t.sqlite"), verify=False, avg_timing=2)


def timed(machine, layer: Layer, cache: TimingCache, **options):
    """Options of a layer in 16 bits, timed warm, their finalists also cold; and the timer."""
    timer = Timer(machine, cache, Conditions.of(machine, 0), 3, **options)
    found = list_candidates(layer, list_enabled_tactics("cuda", ()), machine, Permissions(frozenset({F16})))
    options = [o for o in found.options if not o.tactic.fallback and all(x.dtype is F16 for x in o.signature.outputs)]
    timer.time(layer, found.text, options, keep=True)
    timer.time_cold(layer, found.text, options)
    return options, timer


def conv(channels: int, taps: int, filters: int = 64) -> Layer:
    net = Network("net", "lowered")
    x = net.add_input("x", parse_type(f"f32[1,{channels},14,14]"))
    w = net.constant((np.random.default_rng(0).standard_normal((filters, channels, taps, taps)) / 16).astype("f4"), "w")
    net.mark_output(net.add("Conv", x, w, pads=(taps // 2,) * 4), "y")
    return net.layers[0]


@pytest.mark.parametrize("layer", [conv(64, 3), conv(256, 1), conv(512, 3, 512)], ids=["73 kB", "33 kB", "4.7 MB, more than the cache"])
def test_every_launch_of_a_cold_chain_reads_its_weights_from_memory(gpu, layer):
    options, timer = timed(gpu(), layer, TimingCache(""))
    near = select_finalists(layer, options)
    assert 1 <= len(near) <= COLD_FINALISTS
    assert [o.cold_ms is not None for o in options] == [o in near for o in options]
    for o in near:
        out_of_memory, held = (count_weight_bytes(layer, o) * 1e3 / rate for rate in (SLOW, FAST))
        assert o.cold_ms == pytest.approx(LAUNCH_S * 1e3 * (1 + sum(map(ord, o.kernel.implementation)) % 7 / 100) + out_of_memory)
        assert o.ms == pytest.approx(o.cold_ms if count_weight_bytes(layer, o) > L2 else o.cold_ms - out_of_memory + held)
    assert timer.cold_timed == len(near)


def test_finalists_are_the_few_that_are_close_and_read_weights(gpu):
    layer = conv(64, 3)
    options, _ = timed(gpu(), layer, TimingCache(""))
    assert len(options) > COLD_FINALISTS
    for k, o in enumerate(options):
        o.ms = 1.0 + 0.001 * k
    assert [o.rank for o in select_finalists(layer, options)] == [o.rank for o in options[:COLD_FINALISTS]]
    options[1].ms = COLD_FINALIST + 0.01
    assert options[1] not in select_finalists(layer, options)
    pool = parse_network('network n lowered\nin %x: f32[1,64,8,8]\n%y = MaxPool(%x, kernel_shape=(2, 2)) from "p"\nout %y\n').layers[0]
    options, timer = timed(gpu(), pool, TimingCache(""))
    assert all(o.ms is not None and o.cold_ms is None and o.cost == o.ms for o in options)
    assert timer.cold_timed == 0


def test_cold_times_rank_the_finalists_first(gpu, monkeypatch):
    """If the order with cold weights is reversed, the last finalist of the warm ranking is selected."""

    def transposed(bench, options, rounds, l2_bytes):
        slowest = max(o.ms for o in options)
        return {o.rank: [3 * slowest - o.ms] * rounds for o in options}

    monkeypatch.setattr(timing, "sample_cold_weights", transposed)
    options, _ = timed(gpu(), conv(64, 3), TimingCache(""))
    near = [o for o in options if o.cold_ms is not None]
    best = max(near, key=lambda o: o.ms)
    assert best.ms > min(o.ms for o in near)
    assert best.cost == best.cold_ms == min(o.cost for o in options)
    assert timing.select_fastest(options).cost <= 1.005 * best.cost
    extra = min(o.cold_ms - o.ms for o in near)
    assert all(o.cost == pytest.approx(o.ms + extra) for o in options if o.cold_ms is None)


def test_finalists_are_timed_in_alternating_order(gpu):
    layer = conv(64, 3)
    options, timer = timed(gpu(), layer, TimingCache(""))
    near, machine = select_finalists(layer, options), timer.backend
    assert len(near) > 1
    machine.cold_runs.clear()
    samples = sample_cold_weights(Bench(timer, layer), near, 3, L2)
    n = len(near)
    first, second = machine.cold_runs[n : 2 * n], machine.cold_runs[2 * n : 3 * n]
    assert second == first[::-1]
    assert len(set(map(id, first))) == n
    assert all(len(s) == 3 for s in samples.values()), "the warm-up captures the graphs and is not counted"


def test_copies_of_weights_fill_little_more_than_twice_the_cache(gpu):
    layer = conv(512, 3, 512)
    options, timer = timed(gpu(), layer, TimingCache(""))
    near = select_finalists(layer, options)
    copies = Copies(Bench(timer, layer), near, 9, L2)
    assert all(n == 2 for n in copies.counts.values()), "one is larger than the cache: the next is read from memory though it was read two runs ago"
    runs = copies.args(near[0], 5)
    assert [r.packed for r in runs[:2]] * 2 + [runs[0].packed] == [r.packed for r in runs]
    assert runs[0].packed != runs[1].packed
    assert runs[0].outputs == runs[1].outputs


def test_a_timing_cache_without_cold_times_misses_only_those(gpu, tmp_path):
    layer, path = conv(64, 3), tmp_path / "t.sqlite"
    with TimingCache(path) as cache:
        options, _ = timed(gpu(), layer, cache)
    expected = [(o.ms, o.cold_ms) for o in options]
    gpu.cold_runs.clear()
    with TimingCache(path) as cache:
        again, timer = timed(gpu(), layer, cache)
        assert cache.misses == 0
    assert [(o.ms, o.cold_ms) for o in again] == expected
    assert not gpu.cold_runs
    with sqlite3.connect(path) as db:  # as written by a version without cold times
        assert db.execute("DELETE FROM timings WHERE about LIKE '%out of the L2 cache%'").rowcount == sum(c is not None for _, c in expected)
    with TimingCache(path) as cache:
        with pytest.raises(BuildError, match="not in the timing cache, and error_on_cache_miss=True forbids"):
            timed(gpu(), layer, cache, error_on_miss=True)
        again, timer = timed(gpu(), layer, cache)
    assert [(o.ms, o.cold_ms) for o in again] == expected
    assert (timer.timed, timer.cold_timed) == (0, sum(c is not None for _, c in expected))


def test_a_gpu_without_memory_for_copies_keeps_the_warm_times(gpu, monkeypatch):
    def full(self, nbytes):
        raise BackendError("no memory")

    monkeypatch.setattr(timing.Timer, "allocate_filler", full)
    options, _ = timed(gpu(), conv(64, 3), TimingCache(""))
    assert all(o.ms is not None and o.cold_ms is None and o.cost == o.ms for o in options)
    assert any(o.note == "not timed with a cold L2 cache: no memory" for o in options)


def test_cold_times_are_reported_and_explained(gpu, config):
    plan = build(parse_network(NET), config)
    assert plan.report.timing.cold_timed >= 2
    assert {"timing", "timing with cold weights"} <= set(plan.report.phase_seconds)
    name = next(n for n, row in plan.report.cold_ms.items() if row[0] is not None)
    row = plan.report.candidates[name][0]
    said = explain(plan, name)
    assert said["chosen"]["cold_ms"] == plan.report.cold_ms[name][0] > row.ms
    assert f"({said['chosen']['cold_ms']:.4f} with weights out of the L2 cache)" in said["why"]
    again = build(parse_network(NET), config)
    assert again.report.timing.cold_timed == 0
    assert again.report.cold_ms == plan.report.cold_ms
    bare = build(parse_network(NET), replace(config, backend="null", precisions=(), timing_cache=""))
    assert bare.report.timing.cold_timed is None


@pytest.mark.gpu
def test_weights_from_memory_take_longer_on_a_gpu():
    """33.5 MB of weights for a few rows: memory bandwidth (4.8 TB/s) bounds the cold time; with cached weights the launch is faster than that."""
    from whet.backends import get_backend
    from whet.backends.cuda import driver

    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    net = Network("net", "lowered")
    w = net.constant((np.random.default_rng(0).standard_normal((4096, 4096)) / 64).astype("f4"), "w")
    net.mark_output(net.add("MatMul", net.add_input("x", parse_type("f32[16,4096]")), w), "y")
    options, timer = timed(get_backend("cuda"), net.layers[0], TimingCache(""))
    near = [o for o in options if o.cold_ms is not None]
    assert near
    shown = [(o.kernel.implementation, o.ms, o.cold_ms) for o in near]
    assert min(o.cold_ms for o in near) > min(o.ms for o in near) + 0.0005, shown
    assert all(count_weight_bytes(net.layers[0], o) / 4.8e12 * 1e3 < o.cold_ms < 4 * o.ms for o in near), shown
    assert timer.cold_s < 2

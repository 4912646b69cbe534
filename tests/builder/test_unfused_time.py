"""Timing fused layers against their parts: the chain of parts gives the same results, is timed interleaved, and is used if faster."""

import dataclasses

import numpy as np
import pytest
from nets import Stages, inputs, residual

from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.builder.candidates.enumerate import list_candidates
from whet.builder.precision.permissions import Permissions
from whet.builder.select.engine_candidate import BenchmarkHarness
from whet.builder.select.unfused_time import LONGEST_CHAIN, UnfusedTime, list_chains, time_chains
from whet.engine.check import check_plan
from whet.measure.timing import Conditions, Timer
from whet.measure.timing_cache import TimingCache
from whet.measure.timing_key import format_layer_text
from whet.network import Layer, Network, from_stored, parse_type, to_stored
from whet.ops import run_network, run_regions
from whet.tactics import Args, get_tactic, load_tactics

CPU = get_backend("cpu")
load_tactics("cpu")
QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=4)


def fused_layer(*more: str) -> Layer:
    """Conv + Add + Relu over [1,16,8,8], and more pointwise ops; w and b constant."""
    rng, body, net = np.random.default_rng(0), Network("body", "lowered"), Network("net", "lowered")
    types = ("f32[1,16,8,8]", "f32[32,16,3,3]", "f32[32]", "f32[1,32,8,8]")
    x, w, b, z = (body.add_input(n, parse_type(t)) for n, t in zip("xwbz", types, strict=True))
    y = body.add("Relu", body.add("Add", body.add("Conv", x, w, b, pads=(1, 1, 1, 1)), z))
    for op in more:
        y = body.add(op, y)
    body.mark_output(y)
    feeds = [net.add_input("x", parse_type(types[0])), *(net.constant(rng.standard_normal(s).astype("f4")) for s in ((32, 16, 3, 3), (32,)))]
    return net.add_layer("Fused", [*feeds, net.add_input("z", parse_type(types[3]))], {"composite": "Conv"}, regions={"body": body})


def list_options(layer: Layer):
    permissions = Permissions.of(BuildConfig())
    found = list_candidates(layer, [get_tactic("cpu/onednn_conv")], CPU, permissions)
    return found.options, permissions


def tactics():
    from whet.builder.candidates.tactic_sources import list_enabled_tactics

    return list_enabled_tactics("cpu", ())


def test_a_chain_computes_the_results_of_the_fused_layer():
    layer, rng = fused_layer(), np.random.default_rng(1)
    options, permissions = list_options(layer)
    assert len({o.signature for o in options}) > 2
    tried = 0
    for best in options:
        chains = list_chains(layer, best, {"cpu/onednn_conv"}, tactics(), permissions, CPU)
        if isinstance(chains, UnfusedTime):
            continue
        tried += 1
        for chain in chains:
            arrays = [t.array() if t.is_constant else rng.standard_normal(t.shape).astype("f4") for t in layer.inputs]
            want = run_regions(layer, arrays)[0]
            operands = zip(arrays, chain.signature.inputs, strict=True)
            buffers = [None if o is None else np.ascontiguousarray(to_stored(a, o.format)) for a, o in operands]
            kernel = chain.kernel
            aligned = CPU.allocate(max(kernel.scratch, 64))
            packed = [CPU.allocate(p.nbytes) for p in kernel.packed]
            for p, buffer in zip(kernel.packed, packed, strict=True):
                buffer.array[: p.nbytes] = p.make()
            out = CPU.allocate(kernel.outputs[0])
            addresses = [0 if b is None else b.ctypes.data for b in buffers]
            target = out.address
            for i, _ in chain.signature.inplace:
                target = addresses[i]
            stream = CPU.stream()
            kernel.enqueue(Args(tuple(addresses), (target,), tuple(b.address for b in packed), aligned.address), stream)
            stream.finish().run()
            raw = buffers[chain.signature.inplace[0][0]].reshape(-1) if chain.signature.inplace else out.array.view("f4")[: want.size]
            got = from_stored(raw.reshape(to_stored(want, chain.signature.outputs[0].format).shape), chain.signature.outputs[0].format, want.shape)
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert tried > 2


def test_a_chain_needs_a_kernel_for_each_part_and_is_not_long():
    options, permissions = list_options(fused_layer())
    fused, all_tactics, conv = {"cpu/onednn_conv"}, tactics(), [get_tactic("cpu/onednn_conv")]
    chains = list_chains(fused_layer("Sigmoid"), options[0], fused, all_tactics, permissions, CPU)
    assert not isinstance(chains, UnfusedTime)
    assert all(c.kernel.implementation.count(" + ") == LONGEST_CHAIN - 1 for c in chains)
    long = list_chains(fused_layer("Sigmoid", "Abs"), options[0], fused, all_tactics, permissions, CPU)
    assert long.reason.startswith("not unfused: only layers of")
    assert list_chains(fused_layer(), options[0], fused, conv, permissions, CPU).reason.startswith("not unfused: its part Add has no kernel that")


def test_times_are_cached_and_read_back(tmp_path):
    layer = fused_layer()
    options, permissions = list_options(layer)
    found = []
    for _ in range(2):
        cache = TimingCache(str(tmp_path / "t.sqlite"))
        timer = Timer(CPU, cache, Conditions("hot", 0), 2)
        chains = list_chains(layer, options[0], {"cpu/onednn_conv"}, tactics(), permissions, CPU)
        found.append(time_chains(layer, format_layer_text(layer), options[0], chains, timer))
        misses = cache.misses
        cache.close()
    assert misses == 0
    assert found[0] == found[1]
    assert found[0].ms > 0
    assert found[0].fused_ms > 0
    assert str(found[0]).startswith("fused ")
    assert options[0].ms is None, "the option's own time is unchanged"


def test_only_clearly_faster_chains_win():
    assert UnfusedTime(1.0, 0.9, 0.05).wins
    assert not UnfusedTime(1.0, 0.98, 0.0).wins  # below the resolution of 3 %
    assert not UnfusedTime(1.0, 0.9, 0.2).wins  # within the noise
    assert not UnfusedTime(reason="no chain").wins


def test_the_report_has_both_times():
    plan = build(residual(), dataclasses.replace(QUICK, tactic_sources=("-WINOGRAD",)))
    rows = [r for rows in plan.report.candidates.values() for r in rows if r.tactic == "unfused"]
    assert rows  # not of all three: layers whose fastest kernels cannot be fused are not compared
    assert all(r.ms is not None and r.reason.startswith("fused ") for r in rows)
    assert all("cpu/onednn_conv" in r.implementation or "cpu/direct_conv" in r.implementation for r in rows)
    none = build(residual(), dataclasses.replace(QUICK, optimization_level=2))
    assert not [r for rows in none.report.candidates.values() for r in rows if r.tactic == "unfused"]


@pytest.fixture
def parts_win(monkeypatch):
    monkeypatch.setattr(UnfusedTime, "wins", property(lambda self: self.ms is not None))

    def measure(harness, candidates):
        for e in candidates:
            harness.bind(e)
            e.samples = [1.0 if e.unfused else 2.0] * 3

    monkeypatch.setattr(BenchmarkHarness, "measure", measure)


def test_parts_that_win_are_in_the_engine_and_in_its_lock(parts_win, tmp_path):
    net = residual()
    plan = build(net, QUICK)
    check_plan(plan)
    assert len(plan.report.unfused) >= 3
    assert all("unfused" in why for _, why in plan.report.unfused)
    assert "unfused" in plan.report.choice.kept
    assert any(x.op == "Relu" for x in plan.network.layers)
    from whet.runtime import bind

    bound, feed = bind(plan, CPU), inputs(net)
    bound.feed(feed)
    bound.run()
    want = run_network(net, feed, widen=True)["y"]
    assert np.abs(bound.fetch()["y"] - want).max() <= 1e-5 * np.abs(want).max()
    save_lock(plan, tmp_path / "lock.json")
    stages = Stages()
    assert plan_digest(build(residual(), dataclasses.replace(QUICK, lock=str(tmp_path / "lock.json")), progress=stages)) == plan_digest(plan)
    assert stages.names
    assert not stages.times

"""Kernels that a build compiles and replays, on a simulated GPU: timed kernels are compiled once; with a timing cache almost none are."""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.compiling import first_configs
from support.standin_gpu import StandInGpu
from whet.builder import BuildConfig, build
from whet.builder.candidates import enumerate as enumerate_module
from whet.builder.candidates.compile_ahead import list_configs_with_texts
from whet.measure import in_network
from whet.network import parse_network
from whet.tactics import get_tactic
from whet.tactics.cuda._device.kernel import GpuKernel

NET = """network block source
in %x: f32[1,32,28,28]
const %w0: f32[64,32,3,3] = seed(1)
const %w1: f32[64,64,3,3] = seed(2)
const %w2: f32[64,64,3,3] = seed(3)
%a = Conv(%x, %w0, pads=(1, 1, 1, 1)) from "first"
%b = Relu(%a) from "first_relu"
%c = Conv(%b, %w1, pads=(1, 1, 1, 1)) from "second"
%d = Relu(%c) from "second_relu"
%e = Conv(%d, %w2, pads=(1, 1, 1, 1)) from "third"
%y = Relu(%e) from "third_relu"
out %y
"""


@pytest.fixture
def gpu(monkeypatch, standin_gpu, tmp_path):
    """Records the texts that a build compiles; no two kernels of a kind take the same time."""
    compiled: list[str] = []
    enqueue = GpuKernel.enqueue

    def by_name(self, args, stream):
        enqueue(self, args, stream)
        stream.calls[-1].cost *= 1 + sum(map(ord, self.implementation)) % 97 / 50

    monkeypatch.setattr(GpuKernel, "enqueue", by_name)
    monkeypatch.setattr(StandInGpu, "capabilities", replace(StandInGpu.capabilities, overlapping_launches=True, compiles_ahead=True))
    monkeypatch.setattr(StandInGpu, "compile_ahead", lambda self, sources: compiled.extend(sources))
    return compiled


@pytest.fixture
def config(tmp_path):
    return BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=str(tmp_path / "t.sqlite"), verify=False, avg_timing=1)


def test_only_timed_kernels_are_compiled_ahead(gpu, config):
    net = parse_network(NET)
    plan = build(net, config)
    first, timed = list(gpu), plan.report.timing.misses
    assert 20 < len(set(first)) <= timed
    gpu.clear()
    capped = build(net, replace(config, max_tactics=4, timing_cache=""))
    assert len(gpu) <= capped.report.timing.misses < timed
    gpu.clear()
    again = build(net, config)
    assert again.choices == plan.choices
    assert 0 < len(set(gpu)) < len(set(first)) / 2, "only the fastest may be needed"
    assert set(gpu) <= set(first)


@pytest.mark.parametrize("factor", [1.0, 1e-3])
def test_few_32_bit_options_are_timed_unless_they_are_close(gpu, config, monkeypatch, factor):
    enqueue = GpuKernel.enqueue

    def wide(self, args, stream):
        enqueue(self, args, stream)
        if "tf32" in self.implementation:
            stream.calls[-1].cost *= factor

    monkeypatch.setattr(GpuKernel, "enqueue", wide)
    plan = build(parse_network(NET.replace("32,28,28]", "32,56,56]")), replace(config, max_tactics=16))
    rows = next(rows for rows in plan.report.candidates.values() if {"cuda/conv", "cuda/conv_tf32"} <= {r.tactic for r in rows})
    timed = [r for r in rows if r.ms is not None and r.tactic != "unfused"]
    far = [r for r in rows if "the first 32-bit options were much slower" in r.reason]
    if factor == 1.0:
        assert far
        assert 0 < sum("f16" not in r.signature for r in timed) <= 4
        assert len(timed) == 10
    else:
        assert not far
        assert sum("f16" not in r.signature for r in timed) > 4
        assert len(timed) == 16
    assert not any(r.reason.startswith("not timed") for r in timed)


def test_options_that_are_timed_because_others_are_close_are_compiled_in_the_background(gpu, config, monkeypatch):
    """Regression: their sources had been dropped, so that one after the other was compiled when it was timed."""
    enqueue = GpuKernel.enqueue

    def wide(self, args, stream):
        enqueue(self, args, stream)
        if "tf32" in self.implementation:
            stream.calls[-1].cost *= 1e-3

    monkeypatch.setattr(GpuKernel, "enqueue", wide)
    sources: dict[tuple, str] = {}
    listed = enumerate_module.list_configs_with_texts

    def noting(tactic, layer, signature, backend):
        found = listed(tactic, layer, signature, backend)
        sources.update({(tactic.name, str(signature), tuple(c)): texts[0] for c, texts in found if len(texts) == 1})
        return found

    monkeypatch.setattr(enumerate_module, "list_configs_with_texts", noting)
    plan = build(parse_network(NET.replace("32,28,28]", "32,56,56]")), replace(config, max_tactics=16))
    timed = {(r.tactic, r.signature, tuple(r.config)) for rows in plan.report.candidates.values() for r in rows if r.ms is not None}
    known = timed & set(sources)
    assert len([k for k in known if "tf32" in k[0]]) > 4
    assert {sources[k] for k in known} <= set(gpu)


def test_choice_from_the_timing_cache_replays_nothing(gpu, config, monkeypatch):
    net = parse_network(NET)
    plan = build(net, config)

    def never(*_, **__):
        raise AssertionError("the timing cache knows what is faster in this network")

    monkeypatch.setattr(in_network.ExchangeableNetwork, "select", never)
    runs, seconds = [], StandInGpu.seconds
    monkeypatch.setattr(StandInGpu, "seconds", lambda self, e, n: runs.append(e) or seconds(self, e, n))
    again = build(net, config)
    assert again.choices == plan.choices
    assert not runs, "the times for the report are in the cache too"
    assert again.report.layer_ms == plan.report.layer_ms


def test_kinds_without_changes_are_not_tried_again(gpu, config, monkeypatch):
    tried, best = [], in_network.ExchangeableNetwork.select

    def noting(self, kind, now, options, *, again):
        tried.append((kind, len(options)))
        return best(self, kind, now, options, again=again)

    monkeypatch.setattr(in_network.ExchangeableNetwork, "select", noting)
    build(parse_network(NET), config)
    kinds = {k for k, _ in tried}
    assert kinds
    assert len(tried) == len(kinds), "times by itself and in the network are equal here: no kind changes, so there is no second sweep"


def test_indistinguishable_configurations_stay_together():
    class Half:
        name = "cuda/half"

        def configs(self, layer, signature, machine):
            machine.compile_ahead(["one", "two"])
            assert machine.capabilities.multiprocessors == 132
            return [("a",), ("b",), ("c",)]

    machine = StandInGpu()
    machine.capabilities = replace(machine.capabilities, compiles_ahead=True)
    machine.compile_ahead = lambda sources: pytest.fail("nothing is compiled while configurations are listed")
    assert list_configs_with_texts(Half(), None, None, machine) == [(("a",), ("one", "two")), (("b",), ()), (("c",), ())]
    assert get_tactic("cuda/conv").name == "cuda/conv"


def test_a_contract_test_compiles_only_what_it_runs():
    class Each:
        name = "cuda/each"

        def configs(self, layer, signature, machine):
            machine.compile_ahead(["one", "two", "three"])
            return [("a",), ("b",), ("c",)]

    machine, compiled = StandInGpu(), []
    machine.capabilities = replace(machine.capabilities, compiles_ahead=True)
    machine.compile_ahead = compiled.extend
    assert first_configs(Each(), None, None, machine, 2) == [("a",), ("b",)]
    assert compiled == ["one", "two"]
    assert first_configs(Each(), None, None, machine) == [("a",), ("b",), ("c",)]

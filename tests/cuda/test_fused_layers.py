"""Fused layers on a simulated GPU: they are built, stored and loaded, and unfused if their parts are faster; kernels that slow the next layers
down are exchanged in the network.
"""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.standin_gpu import StandInGpu
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.builder.select import refine
from whet.engine import engine_bytes, read_engine
from whet.network import parse_network
from whet.ops import OPS, sample_layer
from whet.tactics import list_tactics
from whet.tactics.cuda._device.kernel import GpuKernel

HOPPER = CompileOnlyGpu()
AMPERE = CompileOnlyGpu("sm_80")

NET = """network block source
in %x: f32[1,3,64,64]
const %w0: f32[64,3,7,7] = seed(1)
const %w1: f32[64,64,3,3] = seed(2)
const %w2: f32[128,64,1,1] = seed(3)
const %w3: f32[128,64,1,1] = seed(4)
const %w4: f32[64,128] = seed(5)
%a = Conv(%x, %w0, strides=(2, 2), pads=(3, 3, 3, 3)) from "stem"
%b = Relu(%a) from "stem_relu"
%c = MaxPool(%b, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)) from "pool"
%d = Conv(%c, %w1, pads=(1, 1, 1, 1)) from "first"
%e = Relu(%d) from "first_relu"
%f = Conv(%e, %w2) from "second"
%g = Conv(%c, %w3) from "shortcut"
%h = Add(%f, %g) from "add"
%i = Relu(%h) from "relu"
%j = GlobalAveragePool(%i) from "mean"
%k = Flatten(%j, axis=1) from "flatten"
%y = Gemm(%k, %w4, transB=1) from "classifier"
out %y
"""
CONFIG = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1)


@pytest.fixture
def dear(monkeypatch, standin_gpu):
    """{part of an implementation's name: factor of its time}."""
    factors: dict[str, float] = {}
    enqueue = GpuKernel.enqueue

    def dearer(self, args, stream):
        enqueue(self, args, stream)
        stream.calls[-1].what = self.implementation
        for part, factor in factors.items():
            if part in self.implementation:
                stream.calls[-1].cost *= factor

    monkeypatch.setattr(GpuKernel, "enqueue", dearer)
    return factors


def composites(plan):
    return [layer.composite or layer.op for layer in plan.network.layers if layer.op != "Reformat"]


def test_seven_operations_become_three_layers(dear):
    plan = build(parse_network(NET), CONFIG)
    assert composites(plan) == ["ConvPool", "Conv", "ConvSum", "PoolGemm"]
    again = read_engine(engine_bytes(plan))
    assert str(again.network) == str(plan.network)
    chosen = {c.tactic for c in again.choices.values()}
    assert chosen >= {"cuda/conv_sum", "cuda/pool_gemm"}
    assert chosen & {"cuda/stem_pool", "cuda/stem_rows"}


@pytest.mark.parametrize(
    ("part", "gone", "left"), [("pooled", "ConvPool", "MaxPool"), ("pair", "ConvSum", "Conv"), ("pool gemm", "PoolGemm", "Gemm")]
)
def test_parts_that_are_faster_win(dear, part, gone, left):
    dear[part] = 20.0
    plan = build(parse_network(NET), CONFIG)
    assert gone not in composites(plan)
    assert left in composites(plan)
    assert any("unfused" in why for _, why in plan.report.unfused)


def test_pooling_of_large_batches_is_not_fused(dear):
    plan = build(parse_network(NET.replace("in %x: f32[1,", "in %x: f32[64,")), CONFIG)
    assert composites(plan)[-3:] == ["GlobalAveragePool", "Flatten", "Gemm"]
    assert any("no kernel computes it whole" in why for _, why in plan.report.unfused)


def test_a_kernel_that_slows_the_network_is_exchanged(dear, monkeypatch, tmp_path):
    def middle(plan):
        return next(plan.choices[layer.name].implementation for layer in plan.network.layers if layer.composite == "Conv")

    alone = middle(build(parse_network(NET), CONFIG))

    def seconds(self, executable, repeats):
        neighbours = len({getattr(c, "what", "") for c in executable.calls}) > 1
        extra = sum(1e-4 for c in executable.calls if neighbours and getattr(c, "what", "") == alone)
        return [sum(c.cost for c in executable.calls) + extra] * repeats

    monkeypatch.setattr(StandInGpu, "seconds", seconds)
    assert middle(build(parse_network(NET), CONFIG)) == alone
    monkeypatch.setattr(StandInGpu, "capabilities", replace(StandInGpu.capabilities, overlapping_launches=True))
    cached = replace(CONFIG, timing_cache=str(tmp_path / "timings.sqlite"))
    plan = build(parse_network(NET), cached)
    assert middle(plan) != alone
    assert "changed to kernels that are faster in the network" in plan.report.engines[0].what

    def never(*_):
        raise AssertionError("the timing cache knows what is faster in this network")

    monkeypatch.setattr(refine, "select_in_network", never)
    assert build(parse_network(NET), cached).choices == plan.choices
    monkeypatch.setattr(StandInGpu, "seconds", lambda self, executable, repeats: [1.0] * repeats)
    build(parse_network(NET), CONFIG)  # a network that takes a second is not replayed hundreds of times


COMPOSITES = ("ConvPool", "ConvThenPointwise", "ConvSum", "DepthwiseThenPointwise", "PoolGemm", "PointwiseThenConv", "SqueezeExcite")
PLAIN = [(i, s) for i, s in enumerate(OPS["Fused"].samples) if all(isinstance(x, str) for x in s.inputs)]  # none is quantized
INTEGERS = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "ConvThenPointwise" and (i, s) not in PLAIN]
SAMPLES = [i for i, s in PLAIN if s.attrs["composite"] in COMPOSITES] + INTEGERS


@pytest.mark.parametrize("i", SAMPLES)
def test_another_gpu_runs_the_parts_with_the_formats_of_the_engine(i):
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
    fast = next(t for t in list_tactics("cuda") if layer.composite in t.composites and t.signatures(layer, HOPPER))
    parts = next(t for t in list_tactics("cuda") if t.name == "cuda/decomposed")
    assert fast.refuses(layer, fast.signatures(layer, HOPPER)[0], AMPERE)
    for signature in fast.signatures(layer, HOPPER):
        assert signature in parts.signatures(layer, AMPERE)
        kernel = parts.plan(layer, signature, (), AMPERE)
        assert kernel.outputs == fast.plan(layer, signature, fast.configs(layer, signature, HOPPER)[0], HOPPER).outputs
        assert "wgmma" not in kernel.implementation


@pytest.mark.parametrize("small", ["f16", "bf16"])
def test_gates_in_parts_have_the_weights_of_the_kernel_for_the_whole(small):
    """In 16 bits the parts compute in f32 on values representable in 16 bits; verification compares with these."""
    parts = next(t for t in list_tactics("cuda") if t.name == "cuda/decomposed")
    gate = next(s for s in OPS["Fused"].samples if s.attrs["composite"] == "SqueezeExcite" and s.inputs[0] == "f32[2,144,13,11]")
    _, layer, arrays = sample_layer("Fused", gate)
    signature = next(s for s in parts.signatures(layer, AMPERE) if s.inputs[0].dtype.name == small)
    kernel = parts.plan(layer, signature, (), AMPERE)
    filters = [p.make().view(np.float32) for p in kernel.packed if p.nbytes == 4 * 144 * 6]
    assert len(filters) == 2, "on a GPU without tensor cores for f32 both products keep their weights unchanged"
    for made, given in zip(filters, (arrays[1], arrays[3]), strict=True):
        kept = given.astype(signature.inputs[0].dtype.numpy).astype(np.float32)
        assert sorted(made) == sorted(kept.reshape(-1))
        assert sorted(made) != sorted(given.reshape(-1))

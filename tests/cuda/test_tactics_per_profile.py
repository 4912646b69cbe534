"""Two profiles on a simulated GPU: each selects the fastest kernels for its own batch, and a context uses the kernels of its batch."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.builder import BuildConfig, build
from whet.engine import engine_bytes
from whet.network import parse_network
from whet.runtime import Runtime
from whet.tactics.cuda._device.kernel import GpuKernel

NET = """network block source
in %x: f32[N,32,28,28]
const %w0: f32[64,32,3,3] = seed(1)
const %w1: f32[64,64,3,3] = seed(2)
%a = Conv(%x, %w0, pads=(1, 1, 1, 1)) from "first"
%b = Relu(%a) from "first_relu"
%c = Conv(%b, %w1, pads=(1, 1, 1, 1)) from "second"
%y = Relu(%c) from "second_relu"
out %y
"""
ONE_IMAGE = 64 * 28 * 28 * 4  # bytes of a layer's output, in FP32


def at(n):
    return {"x": (n, 32, 28, 28)}


def test_kernels_of_each_profile_are_those_of_its_batch(standin_gpu, monkeypatch):
    enqueue = GpuKernel.enqueue

    def by_batch(self, args, stream):
        """Split K (k2, k4, ...) is faster for one sample and slower for eight."""
        enqueue(self, args, stream)
        split, single = "_k1" not in self.implementation, self.outputs[0] <= ONE_IMAGE
        stream.calls[-1].cost *= 0.5 if split == single else 1.0

    monkeypatch.setattr(GpuKernel, "enqueue", by_batch)
    config = BuildConfig(
        backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1, profiles=((at(1),) * 3, (at(2), at(8), at(8)))
    )
    plan = build(parse_network(NET), config)
    one, eight = ({c.implementation for c in p.choices.values() if "conv" in c.tactic} for p in plan.by_profile())
    assert one != eight
    engine = Runtime("cuda").load(engine_bytes(plan))
    with engine.create_context() as context:
        for n, kernels in ((1, one), (2, eight), (8, eight), (1, one)):
            context.run({"x": np.zeros(at(n)["x"], np.float32)})
            ran = {s.kernel.implementation for s in context.launches().shaped.steps}
            assert kernels <= ran

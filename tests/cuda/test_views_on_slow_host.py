"""Builds on a simulated GPU with a host that starts launches slowly: views between layers of 16 bits stay in 16 bits."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.slow_host import HostQueue
from support.standin_gpu import StandInCall, StandInGpu
from whet.backends import BACKENDS
from whet.builder import BuildConfig, build
from whet.network import parse_network
from whet.tactics import ViewKernel
from whet.tactics.cuda._device.kernel import GpuKernel

# attention of ViT-B/16 at batch 32, between its two products
NET = """network attention source
in %x: f32[32,197,768]
const %w: f32[768,2304] = seed(1)
const %o: f32[768,768] = seed(2)
%p = MatMul(%x, %w) from "in"
%s = Reshape(%p, shape=(32, 197, 3, 12, 64)) from "heads"
%t = Transpose(%s, perm=(2, 0, 3, 1, 4)) from "by_head"
%q0 = Slice(%t, axes=(0,), starts=(0,), ends=(1,)) from "queries"
%k0 = Slice(%t, axes=(0,), starts=(1,), ends=(2,)) from "keys"
%v0 = Slice(%t, axes=(0,), starts=(2,), ends=(3,)) from "values"
%q = Reshape(%q0, shape=(32, 12, 197, 64)) from "q"
%k1 = Reshape(%k0, shape=(32, 12, 197, 64)) from "k"
%v = Reshape(%v0, shape=(32, 12, 197, 64)) from "v"
%k = Transpose(%k1, perm=(0, 1, 3, 2)) from "k_transposed"
%a = MatMul(%q, %k) from "scores"
%m = Softmax(%a, axis=-1) from "softmax"
%c = MatMul(%m, %v) from "context"
%d = Transpose(%c, perm=(0, 2, 1, 3)) from "by_position"
%e = Reshape(%d, shape=(6304, 768)) from "rows_merged"
%f = MatMul(%e, %o) from "out"
%y = Reshape(%f, shape=(32, 197, 768)) from "y"
out %y
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_the_reshape_after_attention_is_a_view_of_16_bits(seed, standin_gpu, monkeypatch):
    queue = HostQueue(10.0, seed)

    class SlowHostGpu(StandInGpu):
        def seconds(self, executable, repeats):
            return queue.seconds([1e6 * c.cost for c in executable.calls], repeats)

        def seconds_in_row(self, executables):
            return queue.seconds_in_row([[1e6 * c.cost for c in e.calls] for e in executables])

    def enqueue(self, args, stream):
        if not isinstance(self, ViewKernel):
            moved = sum(self.inputs) + sum(self.outputs) + sum(p.nbytes for p in self.packed)
            stream.record(StandInCall(1e-6 + moved / 2.5e12))

    monkeypatch.setattr(GpuKernel, "enqueue", enqueue)
    monkeypatch.setitem(BACKENDS, "cuda", SlowHostGpu)
    config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, optimization_level=2, whole_engines=1)
    plan = build(parse_network(NET), config)
    layers = [(x.composite or x.op, plan.choices[x.name].inputs[0]) for x in plan.network.layers]
    after_input = [(kind, operand[1]) for kind, operand in layers if operand is not None and kind != "Reformat"]
    assert after_input == [("MatMul", "f16"), ("Reshape", "f16"), ("Attention", "f16"), ("Reshape", "f16"), ("MatMul", "f16")]
    assert [kind for kind, _ in layers].count("Reformat") == 1, "only that of the input"

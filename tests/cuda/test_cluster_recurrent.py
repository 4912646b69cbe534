"""Recurrent layers on clusters: on the host against the reference, with threads in random order; machine code; what is refused."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, KEPT_IN_F32, TACTICS, compute, judge, reference

from support.compiling import first_configs
from support.host_cluster import plan_on_host, run_on_host
from support.host_cuda import host_compiler
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.errors import BackendError
from whet.ops import sample_layer as layer_of
from whet.ops._base import Sample
from whet.tactics import PlanRefused
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.recurrent import cluster_recurrent

TACTIC = next(t for t in TACTICS if t.name == "cuda/cluster_recurrent")
try:
    compiler.load_nvrtc()
    CAN_COMPILE = True
except BackendError:
    CAN_COMPILE = False


def recurrent(op, steps, batch, inputs, units, *, directions=1, lengths=None, first=True, peepholes=False, **attrs):
    """A sample of a recurrent layer."""
    gates, states = {"RNN": (1, 1), "GRU": (3, 1), "LSTM": (4, 2)}[op]
    first_states = [f"f32[{batch},{directions},{units}]" if attrs.get("layout") else f"f32[{directions},{batch},{units}]"] * states
    x = f"f32[{batch},{steps},{inputs}]" if attrs.get("layout") else f"f32[{steps},{batch},{inputs}]"
    scale = np.float32(1 / np.sqrt(units))
    r = np.random.default_rng(units).uniform(-scale, scale, (directions, gates * units, units)).astype(np.float32)
    w = np.random.default_rng(inputs).uniform(-scale, scale, (directions, gates * units, inputs)).astype(np.float32)
    operands = [x, w, r, f"const f32[{directions},{2 * gates * units}]"]
    operands += [None if lengths is None else np.array(lengths, np.int32), *(first_states if first else [None] * states)]
    if peepholes:
        operands.append(f"const f32[{directions},{3 * units}]")
    direction = "bidirectional" if directions == 2 else attrs.pop("direction", "forward")
    return op, Sample(tuple(operands), {"hidden_size": units, "direction": direction, **attrs})


def distribution(**values):
    return tuple({"cluster": 2, "warps": 1, "tiles": 1, "columns": 1, **values}.items())


# (sample, distribution): several blocks, idle warps, weights in shared memory, sequences of two groups and more clusters, all models
CASES = {
    "lstm of two blocks": (recurrent("LSTM", 4, 1, 16, 32, directions=2), distribution(cluster=2, warps=4)),
    "idle warps, tail": (recurrent("LSTM", 24, 3, 9, 18, direction="reverse", lengths=[24, 1, 17]), distribution(cluster=2, warps=3)),
    "nine sequences": (recurrent("LSTM", 3, 9, 40, 13, lengths=[1, 3, 2, 3, 0, 3, 2, 3, 1]), distribution(cluster=4, warps=1, columns=2)),
    "peepholes": (recurrent("LSTM", 3, 5, 8, 24, peepholes=True, layout=1, directions=2), distribution(cluster=2, warps=3, columns=2)),
    "gru": (recurrent("GRU", 4, 2, 8, 21, linear_before_reset=1, directions=2), distribution(cluster=2, warps=2, tiles=2)),
    "gru, reset first": (recurrent("GRU", 5, 6, 8, 21, lengths=[5, 2, 4, 1, 5, 3], direction="reverse"), distribution(cluster=2, warps=3)),
    "rnn": (recurrent("RNN", 4, 5, 7, 33, layout=1, clip=0.5), distribution(cluster=2, warps=3, tiles=2, columns=2)),
    "sixteen blocks": (recurrent("LSTM", 3, 1, 8, 64, first=False), distribution(cluster=16)),
    "no step": (recurrent("LSTM", 2, 1, 8, 8, lengths=[0]), distribution()),
}

IN_SHARED = "weights in shared memory"
ALL_TYPES = {"gru", "rnn", "sixteen blocks", IN_SHARED}
CASES[IN_SHARED] = (recurrent("LSTM", 3, 2, 8, 40, first=False), distribution(cluster=2, warps=3, tiles=2))


def check(layer, arrays, signature, kernel, ins, outs, _memory):
    narrow = signature.outputs[0].dtype.numpy
    with np.errstate(all="ignore"):
        fed = [a if a is None else x.astype(a.dtype) if x is not None else a.astype(narrow).astype(a.dtype) for a, x in zip(arrays, ins, strict=True)]
        for i in set(KEPT_IN_F32[layer.op]) & set(range(len(arrays))):
            fed[i] = arrays[i]
        wanted = reference(layer, fed)
    for got, want, o in zip(outs, wanted, signature.outputs, strict=True):
        judge(got, want, kernel.rtol, o.dtype, f"{layer.op} {signature}")


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
def test_kernels_match_the_reference_on_the_host(monkeypatch):
    launches, cases = [], []
    for name, ((op, sample), config) in CASES.items():
        monkeypatch.setattr(cluster_recurrent, "MOST_REGISTERS", 130 if name == IN_SHARED else 255)  # 130: weights of one step of two
        _net, layer, arrays = layer_of(op, sample)
        assert TACTIC.why_not(layer) is None
        for signature in TACTIC.signatures(layer, HOPPER)[:: 1 if name in ALL_TYPES else 3]:  # others in f16 only: half of the time is compiling
            refused = TACTIC.why_unfit(layer, signature, HOPPER)
            if signature.outputs[0].dtype.name == "f32" and "f32[" in str(sample.inputs[5]):
                assert "the first ones are constants" in refused
                continue
            assert refused is None, name
            ran, *case = plan_on_host(monkeypatch, cluster_recurrent, TACTIC, layer, arrays, signature, config, HOPPER)
            launches += ran
            cases.append((_net, (layer, arrays, signature, *case)))
    run_on_host(launches)
    for _, case in cases:
        check(*case)


@pytest.mark.skipif(not CAN_COMPILE, reason="no NVRTC here")
def test_weights_stay_in_registers(tmp_path):
    from test_compile import sass

    _net, layer, _ = layer_of(*recurrent("LSTM", 4, 1, 64, 256))
    signature = TACTIC.signatures(layer, HOPPER)[0]
    sizes = cluster_recurrent.get_sizes(layer, signature)
    way = cluster_recurrent.Distribution(cluster=8, warps=8, tiles=1, columns=1)
    assert way.in_registers(sizes) == sizes.depth
    text = sass(compile_cubin(emit_kernel_source("cluster_recurrent.cu", cluster_recurrent.make_macros(layer, signature, sizes, way))), tmp_path)
    assert text.count("HMMA.16816") >= sizes.depth, "products run on the tensor cores"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": 1, "warps": 16, "tiles": 4},
        {"cluster": 3},
        {"cluster": 16},
        {"warps": 2},
        {"warps": 32, "cluster": 2},
        {"tiles": 3},
        {"columns": 8},
    ],
    ids=str,
)
def test_invalid_distributions_are_refused(changes):
    _net, layer, _ = layer_of(*recurrent("LSTM", 4, 1, 64, 256))
    signature = TACTIC.signatures(layer, HOPPER)[0]
    TACTIC.plan(layer, signature, distribution(cluster=8, warps=8), HOPPER)
    with pytest.raises(PlanRefused, match="does not hold 256 units"):
        TACTIC.plan(layer, signature, distribution(**{"cluster": 8, "warps": 8, **changes}), HOPPER)


def test_layers_for_another_kernel_are_refused():
    def reason(sample, kind, machine=HOPPER):
        _net, layer, _ = layer_of(*sample)
        return TACTIC.why_unfit(layer, next(s for s in TACTIC.signatures(layer, machine) if s.outputs[0].dtype.name == kind), machine)

    assert "Hopper" in reason(recurrent("LSTM", 4, 1, 8, 64), "f16", CompileOnlyGpu("sm_80"))
    assert "more than four units" in reason(recurrent("LSTM", 1, 1, 8, 4), "f16")
    assert "1024 units" in reason(recurrent("LSTM", 1, 1, 8, 1024), "f16")
    assert reason(recurrent("LSTM", 1, 1, 8, 768), "f16") is None
    assert "bounded" in reason(recurrent("RNN", 1, 1, 8, 64, first=False, activations=("Relu",)), "f32")
    assert reason(recurrent("RNN", 1, 1, 8, 64, first=False, activations=("Relu",)), "f16") is None
    op, sample = recurrent("RNN", 1, 1, 8, 64, first=False)
    sample.inputs[2][0, 0, 0] = 7e4
    assert "70000" in reason((op, sample), "f32")


def test_only_layers_that_a_gpu_has_run_are_offered():
    def reason(op, kind, units):
        _net, layer, _ = layer_of(*recurrent(op, 4, 6, 8, units, first=False))
        return TACTIC.refuses(layer, next(s for s in TACTIC.signatures(layer, HOPPER) if s.outputs[0].dtype.name == kind), HOPPER)

    for op in ("LSTM", "GRU", "RNN"):
        for kind in ("f16", "bf16", "f32"):
            assert reason(op, kind, 256) is None
            assert "from 128 units on" in reason(op, kind, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "units"), [("LSTM", 128), ("LSTM", 256), ("LSTM", 512), ("GRU", 200), ("GRU", 256), ("RNN", 200)])
def test_larger_layers_match_the_reference(gpu, op, units):
    for batch, lengths, first in ((1, None, False), (6, [17, 1, 9, 12, 3, 17], True), (6, None, False)):
        attrs = {"linear_before_reset": 1} if op == "GRU" and batch == 1 else {}
        _net, layer, arrays = layer_of(*recurrent(op, 17, batch, 80, units, directions=2, lengths=lengths, first=first, **attrs))
        for signature in TACTIC.signatures(layer, gpu):
            if TACTIC.why_unfit(layer, signature, gpu) is not None:
                continue
            for config in first_configs(TACTIC, layer, signature, gpu, 4):
                kernel = TACTIC.plan(layer, signature, config, gpu)
                for _ in range(3):  # a race may show in some runs only
                    got, fed = compute(gpu, layer, arrays, signature, kernel)
                    for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
                        judge(g, w, kernel.rtol, o.dtype, f"{signature} {config} batch {batch}")

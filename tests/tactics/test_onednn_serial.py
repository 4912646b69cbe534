"""Small layers of oneDNN run on one thread of an engine with several, without a parallel region."""

import ctypes

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend, serial, threads
from whet.network.types import F32
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic
from whet.tactics.cpu.onednn import _kernel

pytestmark = JIT


def list_f32_signatures(tactic, layer, machine):
    """CPUs with instructions for bf16 have more."""
    return [s for s in tactic.signatures(layer, machine) if s.outputs[0].dtype == F32]


def layer_of(op, inputs, **attrs):
    return sample_layer(op, Sample(inputs, attrs))[1:]


CASES = [  # a layer below the limit, and one above it
    ("cpu/onednn_conv", "Conv", ["f32[1,16,8,8]", "const f32[24,16,1,1]"], ["f32[1,64,40,40]", "const f32[64,64,1,1]"]),
    ("cpu/onednn_conv", "ConvTranspose", ["f32[1,8,4,4]", "const f32[8,8,2,2]"], ["f32[1,32,40,40]", "const f32[32,32,2,2]"]),
    ("cpu/onednn_matmul", "MatMul", ["f32[3,20]", "const f32[20,33]"], ["f32[64,128]", "const f32[128,128]"]),
    ("cpu/onednn_softmax", "Softmax", ["f32[8,30]"], ["f32[64,1000]"]),
]


@pytest.mark.parametrize(("name", "op", "small", "large"), CASES)
@pytest.mark.parametrize("is_small", [True, False])
def test_small_layers_run_on_one_thread(name, op, small, large, is_small, monkeypatch):
    attrs = {"strides": (2, 2)} if op == "ConvTranspose" else {}
    layer, arrays = layer_of(op, small if is_small else large, **attrs)
    machine, tactic = CpuBackend(threads=2), get_tactic(name)
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (want,) = run_layer(layer, arrays)
    for signature in list_f32_signatures(tactic, layer, machine):
        for config in tactic.configs(layer, signature, machine):
            kernel, got, _ = compute(layer, arrays, tactic, signature, config)
            assert kernel.team == (2 if is_small else 1)
            assert ("threads=1" in kernel.descriptor.text) is is_small
            np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)
    assert threads.get_threads() == 2


@pytest.mark.parametrize("is_small", [True, False])
def test_the_parts_of_a_small_split_are_moved_by_one_thread(is_small, monkeypatch):
    layer, arrays = layer_of("Split", ["f32[1,12,192]" if is_small else "f32[64,12,192]"], axis=-1, split=(96, 96))
    machine, tactic = CpuBackend(threads=2), get_tactic("cpu/onednn_split")
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    for signature in list_f32_signatures(tactic, layer, machine):
        kernel, got, _ = compute(layer, arrays, tactic, signature, ())
        assert {part.team for part in kernel.parts} == {2 if is_small else 1}
        for part, want in zip(got, run_layer(layer, arrays), strict=True):
            np.testing.assert_array_equal(part, want)
    assert threads.get_threads() == 2


def test_an_engine_of_one_thread_needs_no_switch():
    layer, _ = layer_of("MatMul", ["f32[3,20]", "const f32[20,33]"])
    machine, tactic = CpuBackend(threads=1), get_tactic("cpu/onednn_matmul")
    assert tactic.plan(layer, tactic.signatures(layer, machine)[0], (), machine).team == 1


def test_the_number_of_threads_is_one_during_the_call_and_restored_also_after_a_failure():
    seen = []
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)

    @function
    def kernel(a, b, c, d):
        seen.append((threads.get_threads(), a, b, c, d))
        return 7

    call = serial.SerialCall((ctypes.cast(kernel, ctypes.c_void_p).value, 1 << 40, -2, 3, 4), 5)
    with threads.limited_threads(5):
        assert function(call.native[0])(*call.native[1:]) == 7
        assert threads.get_threads() == 5
    assert seen == [(1, 1 << 40, -2, 3, 4)]


def test_a_pool_besides_libgomp_keeps_its_threads(monkeypatch):
    monkeypatch.setattr(threads, "list_setters", lambda: [1, 2])
    layer, _ = layer_of("MatMul", ["f32[3,20]", "const f32[20,33]"])
    assert "own thread pool" in serial.why_not_serial()
    assert _kernel.select_thread_count(layer, CpuBackend(threads=2)) == 2

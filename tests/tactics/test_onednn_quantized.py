"""Quantized layers by oneDNN beyond the samples: refusals, CPUs without VNNI, packed weights with equal layouts, random layers."""

import os
import subprocess
import sys

import numpy as np
import pytest
from test_onednn_tactics import CPU, check, compute, judge, reference

from whet.composites.quantized import make_quantized_sample
from whet.network import F8E4M3
from whet.ops import OPS, sample_layer
from whet.tactics import get_tactic, is_quantized, list_tactics
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._quantized import drop_implied_bounds, match_quantized

VNNI = pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni"), reason="this CPU has no VNNI: quantized layers are refused")


def quantized_samples():
    found = [s for s in OPS["Fused"].samples if is_quantized(sample_layer("Fused", s)[1])]
    assert len(found) >= 20
    return found


@VNNI
def test_every_quantized_sample_has_a_kernel():
    for sample in quantized_samples():
        _, layer, arrays = sample_layer("Fused", sample)
        if layer.outputs[0].dtype != F8E4M3:  # oneDNN 3.2 has integers only
            assert check(layer, arrays) > 0, sample


def test_float_tactics_leave_quantized_layers_alone():
    for sample in quantized_samples():
        _, layer, _ = sample_layer("Fused", sample)
        for t in list_tactics("cpu"):
            if "*" not in t.ops and not t.quantized:
                assert t.why_not(layer) is not None, t.name


def test_quantized_tactics_leave_float_layers_alone():
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[0])
    assert get_tactic("cpu/onednn_qconv").why_not(layer) == "computes in integers, the layer is not quantized"


def quantized_layer(x, w, *, scale=0.02, zero=0, store=(0.05, 0, "u8"), op="Conv", relu=True, **attrs):
    """One quantized convolution (or product) and its arrays."""
    channels = np.linspace(0.5, 2, w.shape[0 if op == "Conv" else 1]).astype(np.float32) / 2000

    def build(body, values):
        y = body.add(op, *values[:2], **attrs)
        return body.add("Relu", y) if relu else y

    sample = make_quantized_sample(op, [(x, scale, zero, 1), (w, channels, None, 0 if op == "Conv" else 1)], build, store)
    _, layer, arrays = sample_layer("Fused", sample)
    return layer, arrays


@VNNI
def test_packed_weights_of_signed_and_unsigned_inputs_have_different_keys():
    """Their layouts differ only in compensation sums after the elements, which no query reports: they share neither a key nor packed weights."""
    w = np.random.default_rng(0).integers(-127, 128, (32, 16, 3, 3)).astype(np.int8)
    tactic, keys = get_tactic("cpu/onednn_qconv"), []
    for spec, zero in (("full u8[1,16,8,8]", 0), ("full i8[1,16,8,8]", 0), ("full u8[1,16,8,8]", 128)):
        layer, arrays = quantized_layer(spec, w, zero=zero, pads=(1, 1, 1, 1))
        (signature,) = tactic.signatures(layer, CPU)
        config = tactic.configs(layer, signature, CPU)[0]
        kernel, got, _ = compute(layer, arrays, tactic, signature, config)
        judge(got[0], reference(layer, arrays)[0], 0.0, spec)
        keys.append(kernel.packed[list(kernel.places.values()).index(kernel.places["weights"]) and kernel.places["weights"][1]].key)
    assert len(set(keys)) == 3


@VNNI
def test_kernels_that_saturate_are_not_listed():
    layer, _ = quantized_layer("extreme u8[1,64,8,8]", np.full((64, 64, 3, 3), 127, np.int8), pads=(1, 1, 1, 1))
    tactic = get_tactic("cpu/onednn_qconv")
    (signature,) = tactic.signatures(layer, CPU)
    names = [str(dict(c)["impl"]) for c in tactic.configs(layer, signature, CPU)]
    assert any("vnni" in n for n in names)
    assert not any(n.endswith((":avx2", ":sse41", ":avx512_core")) for n in names)


def test_without_vnni_quantized_layers_are_refused_with_the_reason():
    code = (
        "from test_onednn_quantized import quantized_layer; import numpy as np; from whet.tactics import get_tactic\n"
        "for s in ('u8', 'i8'):\n"
        "    layer, _ = quantized_layer(f'extreme {s}[1,16,8,8]', np.full((16, 16, 3, 3), 127, np.int8))\n"
        "    print(get_tactic('cpu/onednn_qconv').why_not(layer))"
    )
    here = os.path.dirname(__file__)
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONPATH": os.pathsep.join([*sys.path, here])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "saturate" in out[0]
    assert "halves the weights" in out[1]


REFUSED = {
    "asymmetric weights": (lambda: quantized_layer("full u8[5,16]", np.ones((16, 8), np.uint8), op="MatMul"), "cpu/onednn_qmatmul", "symmetric i8"),
    "transposed operand": (
        lambda: quantized_layer("full u8[16,5]", np.ones((16, 8), np.int8), op="Gemm", transA=1), "cpu/onednn_qmatmul", "for float products",
    ),
    "transposed convolution": (
        lambda: quantized_layer("full u8[1,8,4,4]", np.ones((8, 8, 2, 2), np.int8), op="ConvTranspose"), "cpu/onednn_qconv", "computes Conv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    make, tactic, words = REFUSED[name]
    assert words in get_tactic(tactic).why_not(make()[0])


@VNNI
@pytest.mark.parametrize("seed", range(12))
def test_random_convolutions(seed):
    rng = np.random.default_rng(seed)
    c, k, r = int(rng.choice([3, 16, 20, 64])), int(rng.choice([8, 16, 33])), int(rng.choice([1, 3, 5]))
    dtype, zero = ("u8", int(rng.integers(0, 256))) if rng.random() < 0.5 else ("i8", int(rng.integers(-128, 128)))
    if rng.random() < 0.5:
        zero = 0
    store = [None, (0.031, 0, "u8"), (0.047, -3, "i8")][int(rng.integers(3))]
    w = rng.integers(-128, 128, (k, c, r, r)).astype(np.int8)
    size = int(rng.integers(6, 14))
    layer, arrays = quantized_layer(f"full {dtype}[2,{c},{size},{size}]", w, zero=zero, store=store, relu=bool(rng.random() < 0.5),
                        pads=(r // 2,) * 4, strides=(int(rng.integers(1, 3)),) * 2)  # fmt: skip
    assert check(layer, arrays) > 0


@pytest.mark.parametrize(
    ("store", "clip", "expected"),
    [
        ((0.05, 0, "u8"), None, []),  # a Relu before u8 with zero point 0 is redundant
        ((0.05, 3, "u8"), None, ["Relu"]),
        ((0.05, 0, "i8"), None, ["Relu"]),
        ((6 / 255, 0, "u8"), (0, 6), []),  # Relu6 with exactly its output range
        ((6 / 254, 0, "u8"), (0, 6), ["Clip"]),
        ((2 / 127, 0, "i8"), (-2, 2), ["Clip"]),  # -128 would remain reachable
        ((2 / 127, 0, "i8"), (-2.02, 2), []),
    ],
)
def test_bounds_that_saturation_sets_anyway_are_left_out(store, clip, expected):
    w = np.random.default_rng(0).integers(-127, 128, (32, 16, 3, 3)).astype(np.int8)

    def build(body, values):
        y = body.add("Conv", *values[:2], pads=(1, 1, 1, 1))
        return body.add("Relu", y) if clip is None else body.add("Clip", y, *values[2:])

    bounds = [] if clip is None else [np.float32(c) for c in clip]
    sample = make_quantized_sample(
        "Conv", [("full u8[1,16,8,8]", 0.02, 0, 1), (w, np.float32(1 / 2000), None, 0), *map(np.asarray, bounds)], build, store
    )
    _, layer, arrays = sample_layer("Fused", sample)
    parts = match_quantized(layer)
    assert [p.op for p in drop_implied_bounds(parts)] == expected
    if dnn.has_isa("avx512_core_vnni"):
        assert check(layer, arrays) > 0

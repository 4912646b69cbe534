"""Chains of poolings in one launch: the emulated kernel against the reference, machine code, refusals, and the network that uses them."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass

from whet import zoo
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.composites.pool_chain import POOL_CHAIN, pool_chain_sample
from whet.frontends.onnx import network_from_onnx
from whet.ops import OPS, run_network, sample_layer
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.pool.pool_chain import PoolChain, make_macros

HOPPER = CompileOnlyGpu()


def as_the_kernel(x, constants):
    """pool_chain.cu in NumPy: along rows, then along columns of the previous pooling, with the kernel's index arithmetic."""
    h, w, half = constants["H"], constants["W"], constants["R"] // 2
    image, at = x.reshape(*x.shape[:2], h * w).copy(), np.arange(h * w)
    parts = [image]
    for _ in range(constants["POOLS"]):
        for step, place, end in ((1, at % w, w), (w, at // w, h)):
            most = image.copy()
            for d in range(1, half + 1):
                before, behind = place >= d, place + d < end
                most[..., before] = np.maximum(most[..., before], image[..., at[before] - d * step])
                most[..., behind] = np.maximum(most[..., behind], image[..., at[behind] + d * step])
            image = most
        parts.append(image)
    return np.concatenate(parts, axis=1).reshape(x.shape[0], -1, h, w)


@pytest.mark.parametrize("sample", POOL_CHAIN.samples, ids=lambda s: s.inputs[0])
def test_rows_then_columns_equal_the_reference(sample):
    network, layer, _ = sample_layer("Fused", sample)
    t = PoolChain()
    (signature,) = [s for s in t.signatures(layer, HOPPER) if s.outputs[0].dtype.name in ("f16", "i8", "u8")]
    assert t.refuses(layer, signature, HOPPER) is None
    assert t.plan(layer, signature, (), HOPPER).rtol == 0
    x = (40 * np.random.default_rng(0).standard_normal(layer.inputs[0].shape)).astype(layer.inputs[0].dtype.numpy)
    (want,) = run_network(network, {network.inputs[0].name: x}).values()
    assert np.array_equal(as_the_kernel(x, make_macros(layer, signature, 1)), want)


def test_large_images_and_odd_channels_are_refused():
    t = PoolChain()
    old = CompileOnlyGpu("sm_86")
    cases = (
        ("f32[1,12,8,8]", HOPPER, "12 channels"),
        ("u8[1,24,8,8]", HOPPER, "24 channels"),
        ("f32[1,8,100,100]", HOPPER, "320000 bytes"),
        ("f32[1,8,60,60]", old, "115200"),
    )
    for x, machine, why in cases:
        layer = sample_layer("Fused", pool_chain_sample(x, 5, 3))[1]
        assert why in t.refuses(layer, t.signatures(layer, machine)[0], machine)
    assert t.refuses(layer, t.signatures(layer, HOPPER)[0], HOPPER) is None
    assert "Softmax" in t.why_not(sample_layer("Softmax", OPS["Softmax"].samples[0])[1])


@pytest.mark.parametrize("kind", [3, 4])
def test_machine_code_of_integers(kind, tmp_path):
    constants = {"TYPE": kind, "H": 20, "W": 20, "R": 5, "POOLS": 3, "SIDE": 1, "THREADS": 416}
    text = sass(compile_cubin(emit_kernel_source("pool_chain.cu", constants)), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "LDG.E.128" in text
    assert "STG.E.128" in text


def test_machine_code_of_f32(tmp_path):
    constants = {"TYPE": 0, "H": 20, "W": 20, "R": 5, "POOLS": 3, "SIDE": 2, "THREADS": 800}
    text = sass(compile_cubin(emit_kernel_source("pool_chain.cu", constants)), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "STG.E.128" in text
    assert re.search(r"FMNMX\.NAN", text), "NaN is kept"


@pytest.mark.parametrize(("arch", "side"), [("sm_90a", 1), ("sm_90a", 2), ("sm_86", 1)])
def test_machine_code(arch, side, tmp_path):
    constants = {"TYPE": 1, "H": 20, "W": 20, "R": 5, "POOLS": 3, "SIDE": side, "THREADS": 416 if side == 1 else 800}
    text = sass(compile_cubin(emit_kernel_source("pool_chain.cu", constants), arch=arch), tmp_path)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "LDG.E.128" in text
    assert "STG.E.128" in text
    assert re.search(r"HMNMX2.*NAN", text), "two values per instruction, NaN kept"


def test_a_detectors_pyramid_becomes_one_layer():
    net = network_from_onnx(zoo.build("yolov5s", batch=1))
    lowered, _ = lower_network(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    composites = [layer.composite or layer.op for layer in lowered.layers]
    assert composites.count("PoolChain") == 1
    assert "MaxPool" not in composites

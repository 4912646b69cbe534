"""Quantized convolutions, products and poolings in own kernels, with the instructions of all CPUs that this one can run: exact accumulators."""

import ctypes

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_quantized import quantized_layer
from test_onednn_tactics import CPU, compute, judge, plain

from whet.backends.cpu import CpuBackend
from whet.builder import BuildConfig, build
from whet.composites.quantized import make_op_body_builder, make_quantized_sample
from whet.network import Network, parse_type
from whet.ops import run_layer, run_network, run_regions, sample_layer
from whet.runtime import Runtime
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT8, INT16, Module
from whet.tactics.cpu._llvm.byte_product import choose_instruction
from whet.tactics.cpu.conv import _indirect_kernel

pytestmark = JIT
NEEDED = {"vpdpbusd": ("avx512_vnni", "avx512vl"), "vpmaddwd": ("avx2", "avx512bw"), "smlal": ()}
CODES = [(instruction, lanes) for instruction in NEEDED for lanes in (4, 8, 16)]


def check(name, layer, arrays, monkeypatch, threads=(1, 3)):
    """The tactic with every instruction of this CPU, vectors of all lengths, and several threads, against the reference."""
    tactic = get_tactic(name)
    assert tactic.why_not(layer) is None
    (want,) = run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)
    monkeypatch.setattr(_indirect_kernel.IndirectKernel, "serial_work", 0)
    (signature,) = tactic.signatures(layer, CPU)
    for instruction, lanes in CODES:
        if not all(map(jit.has, NEEDED[instruction])):
            continue
        monkeypatch.setattr(_indirect_kernel, "count_lanes", lambda lanes=lanes: lanes)
        monkeypatch.setattr(_indirect_kernel, "choose_instruction", lambda _, name=instruction: name)
        for count in threads:
            monkeypatch.setattr("test_onednn_tactics.CPU", CpuBackend(threads=count))
            kernel, (got,), _ = compute(layer, arrays, tactic, signature, ())
            judge(got, want, kernel.rtol and 1e-6, f"{instruction} {lanes} lanes, {count} threads")


@pytest.mark.parametrize(("x", "weights", "attrs"), [
    ("u8[1,16,9,7]", (32, 16, 3, 3), {"pads": (1, 1, 1, 1)}),
    ("i8[2,19,8,8]", (5, 19, 1, 1), {}),
    ("u8[1,3,21,20]", (33, 3, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ("i8[1,3,11,10]", (16, 3, 3, 3), {"pads": (2, 0, 1, 3), "dilations": (2, 1)}),
    ("i8[1,35,9,9]", (35, 1, 3, 3), {"pads": (1, 1, 1, 1), "group": 35}),
    ("u8[2,24,9,9]", (24, 1, 5, 5), {"pads": (2, 2, 2, 2), "strides": (2, 2), "group": 24}),
    ("i8[1,30,7,7]", (20, 6, 3, 3), {"pads": (1, 1, 1, 1), "group": 5}),
    ("u8[1,6,30]", (9, 6, 5), {"pads": (2, 2), "strides": (2,)}),
])  # fmt: skip
@pytest.mark.parametrize("stores", [True, False])
def test_convolutions(x, weights, attrs, stores, monkeypatch):
    """Channels that fill elements and vectors and those that do not, pads of a zero point other than 0, the largest magnitudes."""
    w = np.random.default_rng(5).integers(-128, 128, weights).astype(np.int8)
    zero = 7 if x.startswith("u8") else -5
    store = (9.0, 3, "i8") if stores else None
    layer, arrays = quantized_layer(f"full {x}", w, zero=zero, store=store, relu=False, **attrs)
    check("cpu/indirect_qconv", layer, arrays, monkeypatch)


@pytest.mark.parametrize("dtype", ["u8", "i8"])
def test_extremes_are_exact(dtype, monkeypatch):
    """All products of one sign and the largest size: accumulators of 16 bits would saturate."""
    layer, arrays = quantized_layer(f"extreme {dtype}[1,64,6,6]", np.full((40, 64, 3, 3), -128, np.int8), pads=(1, 1, 1, 1), store=None, relu=False)
    check("cpu/indirect_qconv", layer, arrays, monkeypatch)


@pytest.mark.parametrize("rows", [1, 2, 13])
@pytest.mark.parametrize(("inner", "columns"), [(64, 33), (37, 16), (3, 5)])
def test_products(rows, inner, columns, monkeypatch):
    w = np.random.default_rng(6).integers(-128, 128, (inner, columns)).astype(np.int8)
    layer, arrays = quantized_layer(f"full u8[{rows},{inner}]", w, zero=128, op="MatMul", store=(11.0, 100, "u8"))
    check("cpu/linear_qlayer", layer, arrays, monkeypatch)


@pytest.mark.parametrize(("op", "attrs"), [
    ("GlobalAveragePool", {}), ("AveragePool", {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ("AveragePool", {"kernel_shape": (3, 2), "pads": (1, 1, 1, 0), "count_include_pad": 1}),
])  # fmt: skip
@pytest.mark.parametrize(("x", "zero"), [("u8[2,37,9,8]", 11), ("i8[1,16,7,7]", -9)])
def test_poolings(op, attrs, x, zero, monkeypatch):
    sample = make_quantized_sample(op, [(f"full {x}", 0.02, zero, None)], make_op_body_builder(op, **attrs), (0.013, 4, "i8"))
    check("cpu/indirect_qpool", *sample_layer("Fused", sample)[1:], monkeypatch)


@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize("channels", [3, 16, 45])
def test_maxima(dtype, channels, monkeypatch):
    layer, _ = plain("MaxPool", [f"{dtype}[2,{channels},9,8]"], {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 1)})
    low, high = (-128, 127) if dtype == "i8" else (0, 255)
    arrays = [np.random.default_rng(7).integers(low, high + 1, (2, channels, 9, 8)).astype(layer.needs(0).dtype.numpy)]
    check("cpu/indirect_pool", layer, arrays, monkeypatch)


@pytest.mark.parametrize("type_", [INT8, INT16])
@pytest.mark.parametrize("kept", [1, 2, 5])
def test_truncated_tails_leave_their_neighbours(type_, kept):
    """Bytes after the stored lanes keep their values: they are the next pixel's channels."""
    module = Module()
    with module.function("store_tail", ["i32*", f"{type_}*"], internal=False) as f:
        source, target = f.arguments
        target.store_masked(source.load(0, 16).convert("trunc", type_), [k < kept for k in range(16)])
    values, stored = np.arange(1, 17, dtype=np.int32), np.full(16, 99, f"i{type_.bytes}")
    function = jit.load_function(str(module), "store_tail")
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(function)(values.ctypes.data, stored.ctypes.data)
    assert stored.tolist() == [k + 1 if k < kept else 99 for k in range(16)]


@pytest.mark.parametrize(("flags", "lanes", "instruction"), [
    ({"avx512_vnni", "avx512bw"}, 16, "vpdpbusd"), ({"avx512bw", "sse2"}, 16, "vpmaddwd"), ({"avx2", "sse2"}, 8, "vpmaddwd"),
    ({"sse2"}, 4, "vpmaddwd"), ({"asimd", "asimddp"}, 4, "sdot"), ({"asimd"}, 4, "smlal"),
])  # fmt: skip
def test_instructions_of_cpus(flags, lanes, instruction, monkeypatch):
    monkeypatch.setattr(jit, "has", lambda name: name in flags)
    assert choose_instruction(lanes) == instruction


def test_a_quantized_network_without_onednn_runs_in_own_kernels():
    """Convolutions of both kinds with a residual sum, an average pooling and a classifier: no layer runs in NumPy."""
    rng = np.random.default_rng(2)
    net = Network("net")

    def quantize(t, scale, zero=128):
        s, z = net.constant(np.float32(scale), "s"), net.constant(np.uint8(zero), "z")
        return net.add("DequantizeLinear", net.add("QuantizeLinear", t, s, z), s, z)

    def weights(*shape):
        s, z = net.constant(np.float32(1 / 400), "s"), net.constant(np.int8(0), "z")
        return net.add("DequantizeLinear", net.constant(rng.integers(-127, 128, shape).astype(np.int8), "w"), s, z)

    x = quantize(net.add_input("x", parse_type("f32[1,3,16,16]")), 0.03)
    t = quantize(net.add("Relu", net.add("Conv", x, weights(16, 3, 3, 3), pads=(1,) * 4, strides=(2, 2))), 0.02)
    u = quantize(net.add("Conv", t, weights(16, 1, 3, 3), pads=(1,) * 4, group=16), 0.02)
    t = quantize(net.add("Add", u, t), 0.03)
    t = quantize(net.add("GlobalAveragePool", t), 0.01)
    net.mark_output(net.add("MatMul", net.add("Flatten", t), weights(16, 10)), "y")
    options = {"optimization_level": 1, "avg_timing": 1, "timing_cache": "", "threads": 1, "tactic_sources": ("-ONEDNN",)}
    plan = build(net, BuildConfig(**options))
    assert not {n: c.tactic for n, c in plan.choices.items() if "numpy" in c.tactic or "onednn" in c.tactic}
    assert "cpu/indirect_qconv" in {c.tactic for c in plan.choices.values()}
    feeds = {"x": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)}
    with Runtime().load(plan).create_context() as context:
        np.testing.assert_allclose(context.run(feeds)["y"], run_network(net, feeds)["y"], rtol=0.02, atol=0.05)

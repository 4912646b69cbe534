"""whet's own CPU kernels beyond the samples: tables of every kind of function, images of all sizes and channels, threads, other compilers."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, Listed, compute, place

from whet.backends.cpu import CpuBackend, machine_code
from whet.composites.epilogue import make_conv_silu_sample
from whet.composites.quantized import make_quantized_sample
from whet.composites.rearrange import make_rearrange_sample
from whet.network import Network, compute_stored_shape, from_stored, parse_type, static_shape
from whet.ops import run_layer, run_regions, sample_layer
from whet.tactics import Args, get_tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Step
from whet.tactics.cpu._llvm.registers import AVX512, get_registers, why_no_registers
from whet.tactics.cpu.conv._pointwise_ir import Variant, emit_pointwise_ir
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.quantized.lookup_table import TableKernel, compute_table
from whet.tactics.cpu.quantized.quantize_image import QuantizeImage

JIT = pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))


def table_layer(count, build, store, dtype="u8"):
    _, layer, arrays = sample_layer("Fused", make_quantized_sample("QuantizedTable", [(f"full {dtype}[{count}]", 0.05, 3, 0)], build, store))
    return layer, arrays


@JIT
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.skipif(not jit.has("avx512vbmi"), reason="no AVX-512 VBMI"))])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 32768, 32769, 70001])
def test_every_byte_has_its_own_result(count, wide, monkeypatch):
    """Both kernels, with tails and partitions of any size: the result of a byte does not depend on its index."""
    layer, _ = table_layer(count, lambda body, v: body.add("Exp", v[0]), (0.1, 2, "i8"), "i8")
    tactic = get_tactic("cpu/lookup_table")
    monkeypatch.setattr(type(tactic), "plan", lambda self, x, s, c, machine: TableKernel(x, s, wide, machine.threads))
    x = np.random.default_rng(count).integers(-128, 128, count).astype(np.int8)
    arrays = [x, *(t.array() for t in layer.inputs[1:])]
    results = compute_table(layer)
    assert len(set(results.tolist())) > 50
    for signature in tactic.signatures(layer, CPU):
        kernel, got, _ = compute(layer, arrays, tactic, signature, ())
        assert kernel.implementation == ("avx512_vbmi" if wide else "scalar")
        np.testing.assert_array_equal(got[0], results[x.view(np.uint8)])


@JIT
def test_a_table_equals_the_steps():
    """Erf's GELU with Add, Mul and Div by constants: the reference step by step."""

    def gelu(body, v):
        half = body.add("Mul", v[0], v[1])
        return body.add("Mul", half, body.add("Add", body.add("Erf", body.add("Div", v[0], v[2])), v[3]))

    numbers = [np.array(n, np.float32) for n in (0.5, np.sqrt(2), 1.0)]
    sample = make_quantized_sample("QuantizedTable", [("full u8[2,8]", 0.05, 100, 0), *numbers], gelu, (0.03, 6, "u8"))
    _, layer, arrays = sample_layer("Fused", sample)
    tactic = get_tactic("cpu/lookup_table")
    _, got, _ = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[-1], ())
    x = (arrays[0].astype(np.float64) - 100) * 0.05
    erf = np.vectorize(__import__("math").erf)
    want = np.clip(np.rint(x * 0.5 * (1 + erf(x / np.sqrt(2))) / 0.03) + 6, 0, 255)
    assert np.abs(got[0] - want).max() <= 1
    assert np.mean(got[0] != want) < 0.05


def image_layer(shape, dtype, zero, scale=0.0317):
    net = Network("image")
    x = net.add_input("x", parse_type(f"f32[{','.join(map(str, shape))}]"))
    q = net.constant(np.array(zero, np.int8 if dtype == "i8" else np.uint8), "zero")
    net.mark_output(net.add("QuantizeLinear", x, net.constant(np.array(scale, np.float32), "scale"), q))
    return net.layers[0]


@JIT
@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 7, 5), (1, 2, 16), (3, 4, 9, 33), (1, 3, 64, 64), (2, 3, 4, 5, 6), (1, 4, 127, 131)])
@pytest.mark.parametrize(("dtype", "zero"), [("u8", 0), ("u8", 114), ("i8", 0), ("i8", -7)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_images_are_quantized_channels_last(shape, dtype, zero, threads):
    layer, machine = image_layer(shape, dtype, zero), CpuBackend(threads=threads)
    tactic = get_tactic("cpu/quantize_image")
    (signature,) = tactic.signatures(layer, machine)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 4).astype(np.float32)
    special = np.array([np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0], np.float32)
    x.reshape(-1)[:6] = special[: x.size]
    arrays = [x, *(t.array() for t in layer.inputs[1:])]
    _, got, _ = compute(layer, arrays, tactic, signature, ())
    (want,) = run_layer(layer, arrays)
    off = np.abs(got[0].astype(int) - want.astype(int))
    assert off.max() <= 1
    assert np.count_nonzero(off) <= max(1, 0.002 * off.size)  # ties


@JIT
def test_ties_of_images_go_to_the_even_integer():
    layer = image_layer((1, 3, 8, 8), "i8", 0, scale=0.5)  # a power of two: the scaling itself is exact
    x = (np.arange(192, dtype=np.float32).reshape(1, 3, 8, 8) - 96) / 4
    tactic = get_tactic("cpu/quantize_image")
    arrays = [x, *(t.array() for t in layer.inputs[1:])]
    _, got, _ = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[0], ())
    np.testing.assert_array_equal(got[0], run_layer(layer, arrays)[0])


@JIT
@pytest.mark.parametrize("shape", [(1, 16, 1, 1), (2, 17, 5, 3), (3, 33, 40, 9), (1, 96, 56, 56), (2, 24, 7)])
@pytest.mark.parametrize(("dtype", "zero", "store"), [("u8", 0, (0.02, 0, "u8")), ("u8", 130, (0.01, -7, "i8")), ("i8", -3, (0.05, 9, "u8"))])
@pytest.mark.parametrize("threads", [1, 3])
def test_gates_of_all_sizes(shape, dtype, zero, store, threads):
    text = ",".join(map(str, shape))
    ones = ",".join(map(str, (*shape[:2], *(1,) * (len(shape) - 2))))
    sample = make_quantized_sample("Mul", [(f"full {dtype}[{text}]", 0.02, zero, 1), f"f32[{ones}]"], lambda body, v: body.add("Mul", *v), store)
    _, layer, arrays = sample_layer("Fused", sample)
    tactic, machine = get_tactic("cpu/channel_gate"), CpuBackend(threads=threads)
    want = run_regions(layer, arrays)[0].astype(int)
    for signature in tactic.signatures(layer, machine):
        _, got, _ = compute(layer, [a.copy() for a in arrays], tactic, signature, ())
        off = np.abs(got[0].astype(int) - want)
        assert off.max() <= 1
        assert np.count_nonzero(off) <= max(1, 0.001 * off.size)  # ties


@JIT
@pytest.mark.parametrize("factor", [np.inf, -np.inf, 3e38, np.nan])
def test_nan_and_infinite_gates_saturate(factor):
    _, layer, arrays = sample_layer("Fused", make_quantized_sample("Mul", [("full u8[1,16,4,4]", 0.02, 0, 1), "f32[1,16,1,1]"],
                                                       lambda body, v: body.add("Mul", *v), (0.02, 0, "u8")))  # fmt: skip
    arrays[0][...] = np.maximum(arrays[0], 1)
    arrays[next(i for i, t in enumerate(layer.inputs) if not t.is_constant and t.dtype.is_float)][0, :8] = factor
    tactic = get_tactic("cpu/channel_gate")
    _, got, _ = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[-1], ())
    if not np.isnan(factor):  # no standard defines the integer that NaN becomes
        assert (got[0][:, :8] == (255 if factor > 0 else 0)).all()
    np.testing.assert_array_equal(got[0][:, 8:], run_regions(layer, arrays)[0][:, 8:])


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 5, 8, 8), (3, 8)])
def test_non_images_are_refused(shape):
    assert QuantizeImage().why_not(image_layer(shape, "u8", 0)) is not None


def test_without_a_compiler_the_reason_is_given(monkeypatch):
    why = "llvmlite is not installed"
    monkeypatch.setattr(jit, "why_unavailable", lambda: why)
    layer, _ = table_layer(8, lambda body, v: body.add("Exp", v[0]), (0.1, 2, "i8"))
    assert get_tactic("cpu/lookup_table").why_not(layer) == why
    assert get_tactic("cpu/quantize_image").why_not(image_layer((1, 3, 8, 8), "u8", 0)) == why
    assert get_tactic("cpu/lookup_table").signatures(layer, CPU) == []


@JIT
def test_pointers_have_the_syntax_of_the_compiler():
    opaque = machine_code.use_opaque_pointers("load <16 x float>, <16 x float>* %a, i64* %b, i32 ()* %f")
    assert opaque == "load <16 x float>, ptr %a, ptr %b, ptr %f"


TILES = pytest.mark.skipif(bool(why := jit.why_unavailable() or why_no_registers()), reason=str(why))


@TILES
@pytest.mark.parametrize(("shape", "channels"), [
    ((1, 16, 12, 12), 96), ((2, 24, 5, 5), 144), ((1, 40, 4, 6), 240), ((3, 4, 1, 8), 48), ((1, 112, 14, 14), 64), ((1, 20, 3, 31), 16),
    ((2, 96, 30, 31), 96),
    ((1, 24, 6, 9), 80), ((2, 32, 5, 5), 304), ((3, 8, 4, 7), 107),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_pointwise_convolutions_with_silu(shape, channels, threads):
    """Tiles that do and do not divide an image, several strips of tiles, partly used channel blocks, thread counts that divide nothing."""
    sample = make_conv_silu_sample(f"f32[{','.join(map(str, shape))}]", f"f32[{channels},{shape[1]},1,1]")
    judge_every_config("cpu/pointwise_conv", sample, threads)


@TILES
@pytest.mark.parametrize(("shape", "window", "stride", "pads"), [
    ((1, 16, 12, 14), 3, 1, (1, 1, 1, 1)), ((2, 32, 9, 17), 3, 2, (1, 1, 1, 1)), ((1, 48, 15, 12), 5, 2, (2, 2, 2, 2)),
    ((1, 16, 9, 9), 5, 1, (0, 4, 4, 0)),
    ((1, 16, 5, 16), 7, 1, (6, 3, 3, 2)), ((1, 16, 3, 12), 3, 2, (0, 0, 1, 2)), ((3, 16, 1, 30), 3, 1, (1, 0, 1, 0)),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_depthwise_convolutions_with_silu(shape, window, stride, pads, threads):
    """Windows that extend above, below and to the sides of the image, on one side or both; tiles that do and do not divide a row."""
    weights = f"f32[{shape[1]},1,{window},{window}]"
    sample = make_conv_silu_sample(f"f32[{','.join(map(str, shape))}]", weights, group=shape[1], pads=pads, strides=(stride,) * 2)
    judge_every_config("cpu/depthwise_conv", sample, threads)


def judge_every_config(name, sample, threads):
    """Each configuration of a tactic, on as many threads as it can use, against the reference in float64."""
    _, layer, arrays = sample_layer("Fused", sample)
    arrays[0] *= 8
    tactic, machine = get_tactic(name), CpuBackend(threads=threads)
    (want,) = run_regions(layer, [a.astype(np.float64) for a in arrays])
    (signature,) = tactic.signatures(layer, machine)
    configs = tactic.configs(layer, signature, machine)
    assert configs
    for config in configs:
        kernel = tactic.plan(layer, signature, config, machine)
        for part in kernel.parts:
            part.threads = min(threads, part.sizes[-2])  # small layers too
            part.sizes[-1] = -(-part.sizes[-2] // part.threads)
        got = launched(kernel, arrays[0], signature, layer)
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def launched(kernel, image, signature, layer):
    """The output of a planned kernel with one input image and one output."""
    stored = signature.outputs[0].format
    source, target, packed = place(image, signature.inputs[0]), dnn.allocate_aligned(kernel.outputs[0]), [p.make() for p in kernel.packed]
    target[:] = 0xAB
    stream = Listed()
    kernel.enqueue(Args((source.ctypes.data, 0, 0), (target.ctypes.data,), tuple(p.ctypes.data for p in packed), 0), stream)
    for call in stream.calls:
        call.run()
    shape = static_shape(layer.outputs[0].shape)
    return np.array(from_stored(target.view(np.float32).reshape(compute_stored_shape(stored, shape)), stored, shape))


@TILES
def test_silu_of_special_values_equals_the_ops():
    """Through a convolution that copies its input, in both forms: ends of the range of exp, denormals, infinities, NaN; the piecewise form gives 0
    for magnitudes below 1e-6.
    """
    odd = [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-40, -1e-40, 0.0, -0.0, 87.2, 88.8, -87.2, -87.4, -88.8, -104.0, -1e4, 1e4, 1.0, -1.0, -0.5]
    _, layer, arrays = sample_layer("Fused", make_conv_silu_sample("f32[1,16,5,5]", "f32[16,16,1,1]", bias=False))
    arrays[1][...] = 0
    layer.inputs[1].weight = Network("w").constant(np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1), "eye").weight
    arrays[0][...] = 0
    arrays[0][0, 0].reshape(-1)[: len(odd)] = odd  # one channel: zero times the other channels remains zero
    tactic = get_tactic("cpu/pointwise_conv")
    (signature,) = tactic.signatures(layer, CPU)
    x = np.array(odd, np.float32)
    with np.errstate(all="ignore"):
        want = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
        want[2] = np.nan  # minus infinity times zero
    registers = get_registers()
    for estimate in {registers == AVX512 and jit.has("avx512dq"), False}:
        kernel = tactic.plan(layer, signature, tactic.configs(layer, signature, CPU)[0], CPU)
        blocks, pixels = dict(tactic.configs(layer, signature, CPU)[0]).values()
        steps = (Step("Swish", (("alpha", 1.0),)),)
        kernel.parts[0].ir = emit_pointwise_ir(Variant(blocks, pixels, registers.lanes, steps, estimate))
        got = launched(kernel, arrays[0], signature, layer)[0, 0].reshape(-1)[: len(odd)]
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=2.5e-6 if estimate else 1e-36)


@TILES
def test_silu_error_is_within_its_stated_bound():
    """Over all pieces and across their ends: absolute error 2.5e-6, and above 0 and near it a relative bound; 0 gives 0."""
    side = 1001
    _, layer, arrays = sample_layer("Fused", make_conv_silu_sample(f"f32[1,16,{side},{side}]", "f32[16,16,1,1]", bias=False))
    layer.inputs[1].weight = Network("w").constant(np.eye(16, dtype=np.float32).reshape(16, 16, 1, 1), "eye").weight
    arrays[0][...] = np.linspace(-20, 20, arrays[0].size, dtype=np.float32).reshape(arrays[0].shape)
    arrays[0][0, 0, 0, 0] = 0
    tactic = get_tactic("cpu/pointwise_conv")
    (signature,) = tactic.signatures(layer, CPU)
    got = launched(tactic.plan(layer, signature, tactic.configs(layer, signature, CPU)[0], CPU), arrays[0], signature, layer)[0]
    x = arrays[0][0].astype(np.float64)
    off = np.abs(got - x / (1 + np.exp(-x)))
    assert got[0, 0, 0] == 0
    assert off.max() <= 2.5e-6
    assert (off / np.maximum(np.abs(x / (1 + np.exp(-x))), 1e-30))[x > -1].max() <= 4e-7
    assert np.unique(off).size > 1000  # values were computed


@pytest.mark.parametrize(("change", "why"), [
    ({"x": "f32[1,6,5,5]", "w": "f32[16,6,1,1]"}, "multiples of 4"),
    ({"strides": (2, 2)}, "no strides"), ({"pads": (1, 1, 1, 1)}, "no pads"),
])  # fmt: skip
@JIT
def test_convolutions_that_are_refused(change, why):
    given = {"x": "f32[1,16,5,5]", "w": "f32[32,16,1,1]", **change}
    _, layer, _ = sample_layer("Fused", make_conv_silu_sample(**given))
    assert why in get_tactic("cpu/pointwise_conv").why_not(layer)


@pytest.mark.parametrize("dtype", ["f32", "u8", "i8"])
@pytest.mark.parametrize(("shape", "cut", "perm"), [
    ((1, 255, 8, 8), (1, 3, 85, 8, 8), (0, 1, 3, 4, 2)),
    ((2, 6, 3, 5), (2, 2, 3, 3, 5), (0, 1, 3, 4, 2)),
    ((3, 12, 4, 7), (3, 3, 4, 4, 7), (0, 3, 4, 1, 2)),
    ((2, 6, 3, 5), (2, 6, 1, 3, 5), (3, 1, 0, 4, 2)),
    ((2, 6, 3, 2, 5), (2, 2, 3, 3, 2, 5), (0, 1, 3, 4, 5, 2)),
])  # fmt: skip
def test_removed_channels_follow_the_pixels(shape, cut, perm, dtype):
    _, layer, arrays = sample_layer("Fused", make_rearrange_sample(shape, cut, perm, dtype))
    tactic = get_tactic("cpu/onednn_rearrange")
    (want,) = run_regions(layer, arrays)
    signatures = tactic.signatures(layer, CPU)
    assert {s.inputs[0].format for s in signatures} == {"nhwc", "linear"}
    for signature in signatures:
        assert tactic.refuses(layer, signature, CPU) is None
        for config in tactic.configs(layer, signature, CPU):
            _, got, fed = compute(layer, arrays, tactic, signature, config)
            np.testing.assert_array_equal(got[0], run_regions(layer, fed)[0] if dtype == "f32" else want)

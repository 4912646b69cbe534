"""whet's own CPU kernels beyond the samples: tables of every kind of function, images of all sizes and channels, threads, other compilers."""

import numpy as np
import pytest
from test_onednn_tactics import CPU, compute

from whet.backends.cpu import CpuBackend
from whet.network import Network, parse_type
from whet.ops import run_layer, run_regions, sample_layer
from whet.ops._quantized_samples import quantized
from whet.tactics import get_tactic
from whet.tactics.cpu import _jit
from whet.tactics.cpu.quantize_image import QuantizeImage
from whet.tactics.cpu.table import TableKernel, table

JIT = pytest.mark.skipif(_jit.available() is not None, reason=str(_jit.available()))


def table_layer(count, build, store, dtype="u8"):
    _, layer, arrays = sample_layer("Fused", quantized("Table", [(f"full {dtype}[{count}]", 0.05, 3, 0)], build, store))
    return layer, arrays


@JIT
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.skipif(not _jit.has("avx512vbmi"), reason="no AVX-512 VBMI"))])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 32768, 32769, 70001])
def test_every_byte_has_its_own_result(count, wide, monkeypatch):
    """Both kernels, with tails and shares of threads of any size: what a byte becomes does not depend on its place."""
    layer, _ = table_layer(count, lambda body, v: body.add("Exp", v[0]), (0.1, 2, "i8"), "i8")
    tactic = get_tactic("cpu/table")
    monkeypatch.setattr(type(tactic), "plan", lambda self, x, s, c, machine: TableKernel(x, s, wide, machine.threads))
    x = np.random.default_rng(count).integers(-128, 128, count).astype(np.int8)
    arrays = [x, *(t.array() for t in layer.inputs[1:])]
    results = table(layer)
    assert len(set(results.tolist())) > 50
    for signature in tactic.signatures(layer, CPU):
        kernel, got, _ = compute(layer, arrays, tactic, signature, ())
        assert kernel.implementation == ("own:avx512_vbmi" if wide else "own:scalar")
        np.testing.assert_array_equal(got[0], results[x.view(np.uint8)])


@JIT
def test_a_table_holds_what_the_steps_compute():
    """Erf's GELU with Add, Mul and Div by constants: the reference step by step."""

    def gelu(body, v):
        half = body.add("Mul", v[0], v[1])
        return body.add("Mul", half, body.add("Add", body.add("Erf", body.add("Div", v[0], v[2])), v[3]))

    numbers = [np.array(n, np.float32) for n in (0.5, np.sqrt(2), 1.0)]
    sample = quantized("Table", [("full u8[2,8]", 0.05, 100, 0), *numbers], gelu, (0.03, 6, "u8"))
    _, layer, arrays = sample_layer("Fused", sample)
    tactic = get_tactic("cpu/table")
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
def test_images_become_integers_between_pixels(shape, dtype, zero, threads):
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
    layer = image_layer((1, 3, 8, 8), "i8", 0, scale=0.5)  # a power of two: nothing is rounded before
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
    sample = quantized("Mul", [(f"full {dtype}[{text}]", 0.02, zero, 1), f"f32[{ones}]"], lambda body, v: body.add("Mul", *v), store)
    _, layer, arrays = sample_layer("Fused", sample)
    tactic, machine = get_tactic("cpu/gate"), CpuBackend(threads=threads)
    want = run_regions(layer, arrays)[0].astype(int)
    for signature in tactic.signatures(layer, machine):
        _, got, _ = compute(layer, [a.copy() for a in arrays], tactic, signature, ())
        off = np.abs(got[0].astype(int) - want)
        assert off.max() <= 1
        assert np.count_nonzero(off) <= max(1, 0.001 * off.size)  # ties


@JIT
@pytest.mark.parametrize("factor", [np.inf, -np.inf, 3e38, np.nan])
def test_gates_that_are_no_numbers_saturate(factor):
    _, layer, arrays = sample_layer("Fused", quantized("Mul", [("full u8[1,16,4,4]", 0.02, 0, 1), "f32[1,16,1,1]"],
                                                       lambda body, v: body.add("Mul", *v), (0.02, 0, "u8")))  # fmt: skip
    arrays[0][...] = np.maximum(arrays[0], 1)
    arrays[next(i for i, t in enumerate(layer.inputs) if not t.is_constant and t.dtype.is_float)][0, :8] = factor
    tactic = get_tactic("cpu/gate")
    _, got, _ = compute(layer, arrays, tactic, tactic.signatures(layer, CPU)[-1], ())
    if not np.isnan(factor):  # which integer a NaN becomes, no standard says
        assert (got[0][:, :8] == (255 if factor > 0 else 0)).all()
    np.testing.assert_array_equal(got[0][:, 8:], run_regions(layer, arrays)[0][:, 8:])


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (1, 5, 8, 8), (3, 8)])
def test_other_than_images_are_refused(shape):
    assert QuantizeImage().why_not(image_layer(shape, "u8", 0)) is not None


def test_without_a_compiler_the_reason_is_said(monkeypatch):
    why = "llvmlite is not installed"
    monkeypatch.setattr(_jit, "available", lambda: why)
    layer, _ = table_layer(8, lambda body, v: body.add("Exp", v[0]), (0.1, 2, "i8"))
    assert get_tactic("cpu/table").why_not(layer) == why
    assert get_tactic("cpu/quantize_image").why_not(image_layer((1, 3, 8, 8), "u8", 0)) == why
    assert get_tactic("cpu/table").signatures(layer, CPU) == []


@JIT
def test_pointers_are_written_as_the_compiler_wants_them():
    assert _jit._opaque("load <16 x float>, <16 x float>* %a, i64* %b, i32 ()* %f") == "load <16 x float>, ptr %a, ptr %b, ptr %f"

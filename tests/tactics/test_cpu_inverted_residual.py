"""Inverted residuals as one kernel: bands that overlap or have one row, several threads and samples, epilogues, and the layers that it refuses."""

import numpy as np
import pytest
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend, threads
from whet.composites.inverted_residual import make_inverted_residual_sample
from whet.network import BF16, Network, parse_type
from whet.ops import run_regions, sample_layer
from whet.tactics import get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv.inverted_residual import choose_filtered, choose_tile

TACTIC = get_tactic("cpu/inverted_residual")
needs_kernels = pytest.mark.skipif(TACTIC.unavailable() is not None, reason=str(TACTIC.unavailable()))
CPU = CpuBackend()


def check(sample, band, arrays=None):
    """Compares the kernel for bands of `band` rows with the reference in f64."""
    _, layer, own = sample_layer("Fused", sample)
    arrays = own if arrays is None else arrays
    (signature,) = TACTIC.signatures(layer, CPU)
    kernel, (got,), _ = compute(layer, arrays, TACTIC, signature, (("rows", band),))
    (want,) = run_regions(layer, arrays)
    scale = np.abs(want[np.isfinite(want)]).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=kernel.rtol, atol=kernel.rtol * scale)
    return kernel


@needs_kernels
@pytest.mark.parametrize("band", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [3, 5, 7])
def test_bands_of_any_height(window, stride, band):
    """The last band overlaps the one before; rows and columns outside the image count as zeros."""
    sample = make_inverted_residual_sample(f"f32[2,12,{8 * stride},{9 * stride}]", 40, 24, stride=stride, window=window, residual=stride == 1)
    assert check(sample, band).items == 2 * -(-8 // band)


@needs_kernels
@pytest.mark.parametrize("act", ["Relu", "HardSwish", "silu", "Sigmoid", "Tanh", "Gelu"])
def test_activations(act):
    check(make_inverted_residual_sample("f32[1,16,13,10]", 96, 16, act=act, residual=True), 4)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_thread_has_its_own_memory(count):
    sample = make_inverted_residual_sample("f32[3,24,56,56]", 144, 24)
    backend, before = CpuBackend(threads=count), threads.get_threads()
    _, layer, _ = sample_layer("Fused", sample)
    (signature,) = TACTIC.signatures(layer, backend)
    kernel = TACTIC.plan(layer, signature, (("rows", 7),), backend)
    assert kernel.threads == count
    assert kernel.scratch == count * kernel.sizes["thread_floats"] * 4
    threads.set_threads(count)
    try:
        for _ in range(3):
            check(sample, 7)
    finally:
        threads.set_threads(before)


@needs_kernels
def test_nan_and_infinities_reach_the_pixels_that_read_them():
    sample = make_inverted_residual_sample("f32[1,16,9,9]", 48, 16, residual=True)
    _, layer, arrays = sample_layer("Fused", sample)
    arrays[0] = arrays[0].copy()
    arrays[0][0, 3, 4, 4], arrays[0][0, 5, 0, 8] = np.nan, np.nan
    (signature,) = TACTIC.signatures(layer, CPU)
    _, (got,), _ = compute(layer, arrays, TACTIC, signature, (("rows", 2),))
    (want,) = run_regions(layer, arrays)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@needs_kernels
def test_bands_that_do_not_fit_are_refused():
    _, layer, _ = sample_layer("Fused", make_inverted_residual_sample("f32[1,16,112,112]", 96, 24, stride=2))
    (signature,) = TACTIC.signatures(layer, CPU)
    assert TACTIC.configs(layer, signature, CPU)
    for rows in (0, 56, 57):  # 56 rows take more than a thread's memory
        with pytest.raises(PlanRefused, match="do not fit"):
            TACTIC.plan(layer, signature, (("rows", rows),), CPU)


def test_tiles_fit_the_registers():
    registers = get_registers().count
    for blocks in range(1, 61):
        for pixels in (1, 3, 7, 14, 28, 49, 56, 112, 113):
            tile = choose_tile(blocks, pixels)
            assert blocks % tile.blocks == 0
            assert tile.pixels <= pixels
            assert tile.blocks * tile.pixels + tile.blocks + 1 <= registers
            assert 1 <= choose_filtered(pixels) <= min(pixels, registers - 2)


@needs_kernels
def test_small_images_and_16_bit_floats_stay_unfused(monkeypatch):
    _, large, _ = sample_layer("Fused", make_inverted_residual_sample("f32[1,24,56,56]", 144, 24))
    _, small, _ = sample_layer("Fused", make_inverted_residual_sample("f32[1,24,7,7]", 144, 24))
    assert TACTIC.keeps_unfused(large, ()) is None
    assert "stay in the caches" in TACTIC.keeps_unfused(small, ())
    monkeypatch.setattr(jit, "has", lambda feature: True)
    assert "16-bit" in TACTIC.keeps_unfused(large, (BF16,))


def test_other_layers_are_refused():
    def why(channels=16, hidden=48, stride=1, window=3, act="Relu", last=""):
        net = Network("net")
        x = net.add_input("x", parse_type(f"f32[1,{channels},9,9]"))
        w, v, u = (
            net.constant(np.ones(s, np.float32), n)
            for n, s in (("w", (hidden, channels, 1, 1)), ("v", (hidden, 1, window, window)), ("u", (16, hidden, 1, 1)))
        )
        body = Network("body", "lowered")
        a, b, c, d = (body.add_input(t.name, t.type) for t in (x, w, v, u))
        y = body.add("Conv", body.add("Conv", a, b), c, group=hidden, strides=(stride,) * 2, pads=(window // 2,) * 4)
        z = body.add("Conv", y, d)
        body.mark_output(body.add(last, z) if last else z)
        net.mark_output(net.add("Fused", x, w, v, u, composite="InvertedResidual", regions={"body": body}), "y")
        return TACTIC.why_not(net.layers[-1])

    assert why() is None
    assert "multiples of 4" in why(channels=6)
    assert "windows of 3, 5 or 7" in why(window=9)
    assert "stride of 1 or 2" in why(stride=3)
    assert "not three convolutions" in why(last="Relu")

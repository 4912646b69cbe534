"""RoiAlign by a compiled kernel: modes, coordinates, sample counts that depend on the boxes, boxes outside and not finite, threads."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.errors import BackendError
from whet.network import parse_type
from whet.network.network import Network
from whet.ops import run_layer
from whet.tactics import get_tactic, load_tactic

pytestmark = JIT
RNG = np.random.default_rng(11)


def run(x, boxes, images, threads, monkeypatch, **attrs):
    """(kernel's result, reference's result)"""
    net = Network("net", "lowered")
    arrays = [x, boxes, images]
    types = [f"{d}[{','.join(map(str, a.shape))}]" for d, a in zip(("f32", "f32", "i32" if images.dtype == np.int32 else "i64"), arrays, strict=True)]
    layer = net.add_layer("RoiAlign", [net.add_input(f"x{k}", parse_type(t)) for k, t in enumerate(types)], attrs)
    load_tactic("cpu/roi_align")
    machine, tactic = CpuBackend(threads=threads), get_tactic("cpu/roi_align")
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (signature,) = tactic.signatures(layer, machine)
    monkeypatch.setattr(type(tactic.plan(layer, signature, (), machine)), "serial_work", 0)
    _, (got,), _ = compute(layer, arrays, tactic, signature, ())
    return got, run_layer(layer, arrays)[0]


def make_boxes(count, size):
    """Boxes inside and around an image, among them empty ones and some with negative sizes."""
    low = RNG.uniform(-0.3 * size, size, (count, 2))
    return np.concatenate((low, low + RNG.uniform(-0.1 * size, 0.6 * size, (count, 2))), 1).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_samples_are_the_references(mode, coordinates, ratio, threads, monkeypatch):
    """Fewer bins than a vector, and more with a rest."""
    for bins in ((7, 7), (2, 3), (4, 8)):
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "sampling_ratio": ratio, "spatial_scale": 0.25}
        x, images = RNG.standard_normal((2, 3, 40, 29)).astype(np.float32), RNG.integers(0, 2, 9)
        sizes = {"output_height": bins[0], "output_width": bins[1]}
        got, want = run(x, make_boxes(9, 150), images, threads, monkeypatch, **attrs, **sizes)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_positions_in_a_large_image_are_exact(monkeypatch):
    """Float32 positions near 2,000 would change the weights by 1e-4."""
    x = RNG.standard_normal((1, 1, 2, 2048)).astype(np.float32)
    boxes = np.array([[1980.123, 0, 2040.777, 1], [3.3, 0, 2044.9, 2]], np.float32)
    got, want = run(x, boxes, np.zeros(2, np.int64), 1, monkeypatch, output_height=1, output_width=29, sampling_ratio=2)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_values_that_are_no_numbers(mode, monkeypatch):
    """NaN of the image reaches the bins that read it; samples outside are 0 even where the nearest pixel is infinite."""
    x = RNG.standard_normal((1, 2, 12, 12)).astype(np.float32)
    x[0, 0, 0, 0], x[0, 1, 6, 6], x[0, 1, 3, 9] = np.inf, np.nan, -np.inf
    boxes = np.array([[-9, -9, 3, 3], [2, 2, 11, 11], [0, 0, 11, 11], [np.nan, 1, 5, 5]], np.float32)
    with np.errstate(all="ignore"):
        got, want = run(x, boxes, np.zeros(4, np.int64), 1, monkeypatch, mode=mode, output_height=4, output_width=5, sampling_ratio=2)
    assert np.isnan(want).any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_images_out_of_range_are_the_nearest(monkeypatch):
    x, boxes = RNG.standard_normal((2, 2, 8, 8)).astype(np.float32), make_boxes(4, 8)
    got, want = run(x, boxes, np.array([-3, 0, 1, 7], np.int32), 1, monkeypatch, output_height=3, output_width=3)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_box_with_too_many_samples_is_reported(monkeypatch):
    x, boxes = np.ones((1, 1, 4, 4), np.float32), np.array([[0, 0, 1e9, 2]], np.float32)
    with pytest.raises(BackendError, match="more than 16384 samples"):
        run(x, boxes, np.zeros(1, np.int64), 1, monkeypatch)

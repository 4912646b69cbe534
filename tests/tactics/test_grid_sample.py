"""GridSample by a compiled kernel: modes, paddings, alignment, axes, threads, coordinates far outside and not finite."""

import numpy as np
import pytest
from test_compiled_kernels import JIT
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.ops import run_layer, sample_layer
from whet.ops._samples import Sample
from whet.tactics import get_tactic

pytestmark = JIT


def require_close(layer, arrays, threads, monkeypatch, **how):
    machine, tactic = CpuBackend(threads=threads), get_tactic("cpu/grid_sample")
    monkeypatch.setattr("test_onednn_tactics.CPU", machine)
    (signature,) = tactic.signatures(layer, machine)
    monkeypatch.setattr(type(tactic.plan(layer, signature, (), machine)), "serial_work", 0)
    _, (got,), _ = compute(layer, arrays, tactic, signature, ())
    (want,) = run_layer(layer, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, **how)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_samples_are_the_references(mode, padding, aligned, threads, monkeypatch):
    """Images of one, two and three axes; more positions than a vector and than a block, and a rest."""
    shapes = [("2,3,5,6", "2,9,10,2"), ("1,1,1,7", "1,2,3,2"), ("3,2,8,4", "3,1,5,2")]
    if mode != "cubic":
        shapes += [("2,3,7", "2,70,1"), ("1,2,4,5,6", "1,2,3,4,3")]
    for image, grid in shapes:
        sample = Sample([f"f32[{image}]", f"f32[{grid}]"], {"mode": mode, "padding_mode": padding, "align_corners": aligned})
        _, layer, arrays = sample_layer("GridSample", sample)
        arrays[1] = np.random.default_rng(3).uniform(-1.6, 1.6, arrays[1].shape).astype(np.float32)
        require_close(layer, arrays, threads, monkeypatch)


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_coordinates_that_are_far_outside_or_no_numbers(padding, monkeypatch):
    _, layer, arrays = sample_layer("GridSample", Sample(["f32[1,2,5,6]", "f32[1,4,5,2]"], {"padding_mode": padding}))
    flat = arrays[1].reshape(-1)
    flat[:8] = [np.inf, 0, -np.inf, 0, 1e30, -1e30, np.nan, 0]
    with np.errstate(all="ignore"):
        require_close(layer, arrays, 1, monkeypatch, equal_nan=True)

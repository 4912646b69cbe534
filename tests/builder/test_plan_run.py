"""The reference of an engine with a fixed batch from single samples."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples, small_network

from whet.builder import BuildConfig, build
from whet.builder.precision.accuracy_budget import PlanRun
from whet.errors import ShapeError
from whet.network import Network, parse_type
from whet.ops import run_network


def plan_run(net, shape):
    shapes = {"x": shape}
    config = BuildConfig(profiles=((shapes, shapes, shapes),), threads=1, optimization_level=0, verify=False, timing_cache="")
    return PlanRun(build(net, config), config)


def test_single_samples_fill_the_batch():
    net = small_network()
    run = plan_run(net, (3, 3, 12, 12))
    feeds = samples(3)
    for feed in feeds:
        got, want = run(feed)["y"], run_network(net, feed)["y"]
        assert got.shape == want.shape
        assert np.allclose(got, want, atol=1e-4)
    together = {"x": np.concatenate([f["x"] for f in feeds])}
    assert run(together)["y"].shape[0] == 3


def test_outputs_that_mix_samples_are_refused():
    net = Network("mixed")
    net.mark_output(net.add("ReduceSum", net.add_input("x", parse_type("f32[N,4]")), axes=(0,), keepdims=0), "y")
    with pytest.raises(ShapeError, match="which is which"):
        plan_run(net, (3, 4))({"x": np.ones((1, 4), np.float32)})

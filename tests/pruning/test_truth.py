"""Measured engines: the computation's time by the device's clock, and ratios to the first engine."""

import pytest

from whet import BuildConfig
from whet.backends import get_backend
from whet.network import parse_network
from whet.pruning.truth import measure_engines
from whet.runtime import bind

NET = "network n source\nin %x: f32[64,{0}]\nconst %w: f32[{0},64] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n"


def test_the_time_is_that_of_the_kernels_by_the_devices_clock():
    """The null backend's clock adds the costs of the kernels; copies of inputs and outputs have no cost there."""
    nets = [parse_network(NET.format(k)) for k in (256, 64)]
    large, small = measure_engines(nets, BuildConfig(backend="null", timing_cache=""), seconds=0.05)
    for m in (large, small):
        (seconds,) = bind(m.plan, get_backend("null")).seconds(1)
        assert m.ms == pytest.approx(1e3 * seconds)
    assert (large.ratio, large.ratio_interval) == (1.0, (1.0, 1.0))
    assert small.ratio == pytest.approx(small.ms / large.ms)
    low, high = small.ratio_interval
    assert low <= small.ratio <= high < 1

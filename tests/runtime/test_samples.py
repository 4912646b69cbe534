"""Samples of a tensor in an arena, read by several threads if they are large."""

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.network import Network, parse_type
from whet.runtime import bind


@pytest.mark.parametrize("size", [4, 160])
def test_samples_are_those_of_the_whole_value(size):
    net = Network("one")
    x = net.add_input("x", parse_type(f"f32[8,16,{size},{size}]"))
    w = net.constant(np.random.default_rng(1).standard_normal((16, 16, 1, 1)).astype("f4"))
    net.mark_output(net.add("Conv", net.add("Relu", x), w), "y")
    plan = build(net, BuildConfig(timing_cache="", optimization_level=0, verify=False))
    bound = bind(plan, get_backend("cpu"))
    bound.feed({"x": np.random.default_rng(0).standard_normal((8, 16, size, size)).astype("f4")})
    bound.run()
    for at, block in (([0, 3, 7], 1), ([1, 3], 2), ([5], 1)):
        whole = bound.value("y")
        want = np.concatenate([whole[i * block : (i + 1) * block] for i in at])
        got = bound.samples("y", at, block)
        assert got.flags.c_contiguous
        assert got.tobytes() == want.tobytes()

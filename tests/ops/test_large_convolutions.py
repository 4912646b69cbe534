"""References of large convolutions: a block of the result at a time gives the same values in little memory."""

import tracemalloc

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.ops import conv, run_network


def make_convolution(shape, filters, **attrs):
    rng, net = np.random.default_rng(1), Network("convolution")
    x = net.add_input("x", parse_type(f"f32[{','.join(map(str, shape))}]"))
    w, b = (net.constant(rng.standard_normal(s).astype(np.float32)) for s in (filters, filters[:1]))
    net.mark_output(net.add("Conv", x, w, b, **attrs), "y")
    return net, {"x": rng.standard_normal(shape).astype(np.float32)}


CASES = {
    "sequences": ((3, 4, 50), (6, 4, 5), {"pads": (2, 2)}),
    "strided": ((2, 6, 17, 9), (4, 6, 3, 2), {"strides": (2, 1), "dilations": (1, 2)}),
    "groups": ((2, 8, 9, 9), (12, 4, 3, 3), {"group": 2, "pads": (1,) * 4}),
    "volumes": ((2, 3, 6, 7, 5), (5, 3, 3, 3, 3), {"pads": (1,) * 6}),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_give_the_values_of_the_whole(name, monkeypatch):
    net, inputs = make_convolution(*CASES[name][:2], **CASES[name][2])
    whole = run_network(net, inputs, widen=True)["y"]
    for columns in (1, 300, 1000):
        monkeypatch.setattr(conv, "MOST_COLUMNS", columns)
        np.testing.assert_allclose(run_network(net, inputs, widen=True)["y"], whole, rtol=1e-12, atol=1e-12)


def test_the_columns_of_a_volume_are_never_all_in_memory():
    net, inputs = make_convolution((1, 16, 32, 32, 32), (16, 16, 3, 3, 3), pads=(1,) * 6)
    tracemalloc.start()
    try:
        run_network(net, inputs, widen=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80e6, "all columns in float64 take 113 MB"

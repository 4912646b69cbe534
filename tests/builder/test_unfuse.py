"""Unfused layers: a Concat shared by several fused layers is computed once, and the values are unchanged."""

import numpy as np
import pytest

from whet.builder.candidates.unfuse import unfuse
from whet.network import parse_network, verify
from whet.ops import run_network
from whet.passes import lower

JOINED = """network joined source
in %x: f32[2,8,6,5]
in %y: f32[2,16,6,5]
const %u: f32[16,24,1,1] = seed(1)
const %v: f32[16,24,1,1] = seed(2)
%a = Relu(%x)
%b = Relu(%y)
{joins}
%c = Conv({first}, %u)
%d = Conv({second}, %v)
%e = Sigmoid(%c)
%f = Tanh(%d)
%g = Mul(%e, %f)
out %g
"""
ONE = {"joins": "%j = Concat(%a, %b, axis=1)", "first": "%j", "second": "%j"}
TWO = {"joins": "%j = Concat(%a, %b, axis=1)\n%k = Concat(%b, %a, axis=1)", "first": "%j", "second": "%k"}


@pytest.mark.parametrize(("joins", "count"), [(ONE, 1), (TWO, 2)])
def test_a_concat_of_several_layers_is_computed_once(joins, count):
    net = parse_network(JOINED.format(**joins))
    low, _ = lower(net, refuses=lambda layer: None)
    assert not any(x.op == "Concat" for x in low.layers), "both convolutions read the two images in place"
    while fused := next((x for x in low.layers if x.composite in ("ConcatInputConv", "DualOutputConv")), None):
        unfuse(low, fused)
    verify(low)
    assert sum(x.op == "Concat" for x in low.layers) == count
    rng = np.random.default_rng(0)
    feeds = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in net.inputs}
    (want,), (got,) = run_network(net, feeds).values(), run_network(low, feeds).values()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

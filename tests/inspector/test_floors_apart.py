"""Layers that an engine computes together count as they do one by one: the roofline of a network is the same whatever was fused."""

import pytest

from whet.builder import BuildConfig, build
from whet.inspector.apart import apart
from whet.inspector.facts import layer_facts
from whet.network import parse_network

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

NET = """network block source
in %x: f32[2,32,24,24]
const %w0: f32[32,32,1,1] = seed(1)
const %w1: f32[32,32,3,3] = seed(2)
%a = Conv(%x, %w0)
%b = Relu(%a)
%c = Conv(%b, %w1, pads=(1, 1, 1, 1))
%d = Relu(%c)
%e = Add(%d, %x)
%f = MaxPool(%e, kernel_shape=(2, 2), strides=(2, 2))
out %f
"""


def counted(**config):
    plan = build(parse_network(NET), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1, **config))
    facts = layer_facts(plan)
    return {x.layer.hint or x.layer.op for x in facts}, sorted(p for x in facts if x.layer.op != "Reformat" for p in apart(x))


def test_a_launch_of_two_layers_counts_as_two(standin_gpu):
    fused, together = counted()
    plain, alone = counted(passes=("-fuse_product_conv",))
    assert "ProductConv" in fused
    assert "ProductConv" not in plain
    assert together == alone

"""Chains of elementwise layers that read a value more than once: one kernel, in which the value is one operand."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, planned, reference

from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.network import Network, parse_type
from whet.tactics.cuda.elementwise.elementwise import match_chain


def response_normalization():
    """ConvNeXt V2: x * factor * gamma + beta + x, the factor one value per channel of each image."""
    rng, net = np.random.default_rng(0), Network("grn")
    x, factor = net.add_input("x", parse_type("f32[2,16,6,5]")), net.add_input("factor", parse_type("f32[2,16,1,1]"))
    gamma, beta = (net.constant(rng.standard_normal((1, 16, 1, 1)).astype(np.float32)) for _ in range(2))
    scaled = net.add("Add", net.add("Mul", net.add("Mul", x, factor), gamma), beta)
    net.mark_output(net.add("Add", scaled, x), "y")
    return net


def read_layer():
    low, _ = lower_network(response_normalization(), BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    (layer,) = low.layers
    return low, layer


def test_a_value_that_is_read_twice_is_one_operand():
    _net, layer = read_layer()
    chain = match_chain(layer)
    assert not isinstance(chain, str)
    assert chain.inputs == [0, 1, 2, 3]
    assert chain.text.count("operand(p, 0, at, length)") == 1  # once more than the chain's beginning, which the kernel reads by itself
    assert {t.name for t, *_ in planned(layer, HOPPER)} == {"cuda/elementwise"}


@pytest.mark.gpu
def test_a_value_that_is_read_twice_is_right(gpu):
    _net, layer = read_layer()
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else rng.standard_normal(t.shape).astype(np.float32) for t in layer.inputs]
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")

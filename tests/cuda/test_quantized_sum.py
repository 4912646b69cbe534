"""Sums of two quantized convolutions in one launch: layers that are fused, and results of the kernel."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.precision.int8 import prepare
from whet.network import Network, parse_type
from whet.ops import run_regions
from whet.passes import lower
from whet.precision import Range, Ranges, find_quantization_sites, quantize
from whet.tactics import TACTICS, load_tactics

CONFIG = BuildConfig(backend="cuda", precisions=("fp16", "int8"), timing_cache="", avg_timing=1)
HOPPER = CompileOnlyGpu()


def block(n=2, size=16, channels=(64, 64), filters=256, stride=1, taps=1, low=-1.0, act="Relu"):
    """The end of a residual block with a projection: the layers of a lowered quantized network."""
    rng, (c, d) = np.random.default_rng(0), channels
    net = Network("block")
    x = net.add("Relu", net.add_input("x", parse_type(f"f32[{n},{c},{size},{size}]")))
    y = net.add("Relu", net.add_input("y", parse_type(f"f32[{n},{d},{size * stride},{size * stride}]")))
    w = net.constant((rng.standard_normal((filters, c, taps, taps)) / (8 * taps)).astype(np.float32), "w")
    v = net.constant((rng.standard_normal((filters, d, 1, 1)) / 8).astype(np.float32), "v")
    b = net.constant(rng.standard_normal(filters).astype(np.float32), "b")
    one, other = net.add("Conv", x, w, b, pads=(taps // 2,) * 4), net.add("Conv", y, v, b, strides=(stride, stride))
    z = net.add("Add", one, other)
    z = net.add(act, z) if act else z
    net.mark_output(net.add("Conv", z, net.constant((rng.standard_normal((16, filters, 2, 2)) / 8).astype(np.float32), "u"), None), "out")
    made = prepare(net, CONFIG)
    ranges = {t.name: Range(low if t.name in ("relu", "relu_1") else -3.0, 4.0) for t in find_quantization_sites(made).roots}
    return lower(quantize(made, Ranges(ranges)), refuses=lambda layer: None)[0]


def sums(net):
    """The layers formed by the pass."""
    return [x for x in net.layers if x.composite == "QuantizedSum"]


SHAPES = {
    "first stage": {"n": 3},
    "stride": {"n": 2, "size": 14, "channels": (128, 256), "filters": 512, "stride": 2},
    "few pixels, other steps": {"n": 1, "size": 7, "channels": (64, 208), "filters": 96},
    "3x3 first": {"n": 2, "size": 13, "channels": (64, 32), "filters": 64, "stride": 2, "taps": 3, "low": 0.0},
    "many tiles": {"n": 12, "size": 56},
    "signed results": {"n": 2, "act": ""},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_projection_and_the_last_convolution_become_one_layer(name):
    load_tactics("cuda")
    (layer,), mine = sums(block(**SHAPES[name])), TACTICS["cuda/qconv_sum"]
    (signature,) = mine.signatures(layer, HOPPER)
    assert mine.refuses(layer, signature, HOPPER) is None
    configs = mine.configs(layer, signature, HOPPER)
    assert len(configs) >= 3
    for config in configs:
        assert mine.plan(layer, signature, config, HOPPER).rtol == 0.0


def test_refusals_give_the_reason():
    load_tactics("cuda")
    mine = TACTICS["cuda/qconv_sum"]
    (layer,) = sums(block(taps=3))  # a zero point at padding
    assert "padding other than the integer 0" in mine.why_not(layer)
    (layer,) = sums(block(filters=80))
    assert "80 results" in mine.refuses(layer, mine.signatures(layer, HOPPER)[0], HOPPER)
    assert "Hopper" in mine.refuses(layer, mine.signatures(layer, HOPPER)[0], CompileOnlyGpu("sm_80"))


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))
@pytest.mark.parametrize("name", SHAPES)
def test_every_instance_equals_the_reference(name):
    from test_tactics import compute

    from whet.backends import get_backend

    load_tactics("cuda")
    gpu, (layer,), mine = get_backend("cuda"), sums(block(**SHAPES[name])), TACTICS["cuda/qconv_sum"]
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else rng.integers(0, 256, t.shape).astype(t.dtype.numpy) for t in layer.inputs]
    (want,) = run_regions(layer, arrays)
    assert len(np.unique(want)) > 50
    (signature,) = mine.signatures(layer, gpu)
    for config in mine.configs(layer, signature, gpu):
        ((got,), _) = compute(gpu, layer, arrays, signature, mine.plan(layer, signature, config, gpu))
        assert np.abs(got.astype(int) - want.astype(int)).max() <= 1, config
        assert (got != want).mean() < 0.01, config

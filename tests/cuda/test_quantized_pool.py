"""The quantized first convolution with its pooling and the image's quantization: how it is made, and what its kernel computes."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.builder import BuildConfig, build
from whet.builder.quantized import prepared
from whet.network import Network, parse_type
from whet.ops import run_regions
from whet.passes import lower
from whet.precision import Range, Ranges, find_places, quantize
from whet.tactics import TACTICS, load_tactics

CONFIG = BuildConfig(backend="cuda", precisions=("fp16", "int8"), timing_cache="", avg_timing=1)


def stem(image=(2, 3, 32, 32), filters=7, stride=2, pool=(3, 2, 1), act="Relu", skewed=False):
    """A quantized network of a first convolution, pooling, and a 1x1 convolution behind it."""
    rng = np.random.default_rng(0)
    net = Network("stem")
    x = net.add_input("x", parse_type("f32[" + ",".join(map(str, image)) + "]"))
    w = net.constant((rng.standard_normal((64, image[1], filters, filters)) / filters).astype(np.float32), "w0")
    b = net.constant(rng.standard_normal(64).astype(np.float32), "b0")
    y = net.add("Conv", x, w, b, strides=(stride, stride), pads=(filters // 2,) * 4)
    y = net.add(act, y) if act else y
    size, step, pad = pool  # size 0: not pooled
    y = net.add("MaxPool", y, kernel_shape=(size, size), strides=(step, step), pads=(pad,) * 4) if size else y
    net.mark_output(net.add("Conv", y, net.constant((rng.standard_normal((32, 64, 1, 1)) / 8).astype(np.float32), "w1"), None), "y")
    made = prepared(net, CONFIG)
    low = -1.0 if skewed else -3.0
    ranges = {t.name: Range(low if t.name == "x" else 0.0 if act == "Relu" else -4.0, 3.0 if t.name == "x" else 4.0) for t in find_places(made).roots}
    return quantize(made, Ranges(ranges))


def whole(net, hint="ConvPool"):
    """The layer that the pass makes, as candidates see it."""
    lowered, _ = lower(net, refuses=lambda layer: None)
    return next(x for x in lowered.layers if x.hint == hint)


def test_one_layer_from_the_image_to_the_pooled_integers(standin_gpu):
    plan = build(stem(), BuildConfig(**{**vars(CONFIG), "verify": False}))
    first = plan.network.layers[0]
    assert first.hint == "ConvPool"
    assert [x.op for x in first.regions["body"].layers] == ["QuantizeLinear", "Fused", "MaxPool"]
    assert plan.choices[first.name].tactic == "cuda/own_qfirst_pool"
    assert plan.choices[first.name].inputs[0] == ("linear", "f32")
    assert plan.report["precisions"]["int8"]["layers"] == 2


def test_without_pooling_the_convolution_reads_the_image_itself(standin_gpu):
    plan = build(stem(pool=(0, 0, 0)), BuildConfig(**{**vars(CONFIG), "verify": False}))
    first = plan.network.layers[0]
    assert first.hint == "ImageConv"
    assert plan.choices[first.name].tactic == "cuda/own_qfirst_image"
    assert plan.choices[first.name].inputs[0] == ("linear", "f32")


def test_it_is_taken_apart_where_its_parts_are_faster(standin_gpu):
    standin_gpu["pooled"] = 30.0
    plan = build(stem(), BuildConfig(**{**vars(CONFIG), "verify": False}))
    assert [x.hint or x.op for x in plan.network.layers if x.op != "Reformat"] == ["QuantizeLinear", "Conv", "MaxPool", "Conv"]
    assert any("apart" in why for _, why in plan.report["unfused"])


def test_other_windows_and_channels_are_refused_with_the_reason():
    load_tactics("cuda")
    mine = TACTICS["cuda/own_qfirst_pool"]
    machine = type("Hopper", (), {"features": ("wgmma", "tma")})
    layer = whole(stem(pool=(5, 2, 2)))
    assert "windows of 5" in mine.refuses(layer, mine.signatures(layer, machine)[0], machine)
    assert "Hopper" in mine.refuses(layer, mine.signatures(layer, machine)[0], type("Ampere", (), {"features": ()}))


SHAPES = {
    "resnet": {"image": (3, 3, 64, 64)},
    "odd sizes": {"image": (2, 3, 45, 39)},
    "zero point, one channel": {"image": (2, 1, 32, 40), "skewed": True},
    "signed results": {"image": (2, 3, 32, 32), "act": ""},
    "small filter, windows side by side": {"image": (2, 4, 32, 32), "filters": 3, "stride": 1, "pool": (2, 2, 0)},
    "leaky": {"image": (2, 3, 32, 32), "act": "LeakyRelu"},
    "not pooled": {"image": (2, 3, 45, 39), "filters": 3, "pool": (0, 0, 0)},
    "not pooled, zero point, leaky": {"image": (1, 3, 64, 64), "pool": (0, 0, 0), "skewed": True, "act": "LeakyRelu"},
}


@pytest.mark.gpu
@pytest.mark.skipif(driver.available() is not None, reason=str(driver.available()))
@pytest.mark.parametrize("name", SHAPES)
def test_every_instance_gives_the_reference(name):
    from test_tactics import compute

    from whet.backends import get_backend

    pooled = SHAPES[name].get("pool") != (0, 0, 0)
    gpu, layer = get_backend("cuda"), whole(stem(**SHAPES[name]), "ConvPool" if pooled else "ImageConv")
    load_tactics("cuda")
    mine = TACTICS["cuda/own_qfirst_pool" if pooled else "cuda/own_qfirst_image"]
    rng = np.random.default_rng(1)
    arrays = [t.array() if t.is_constant else (2 * rng.standard_normal(t.shape)).astype(np.float32) for t in layer.inputs]
    (want,) = run_regions(layer, arrays)
    tried = 0
    for signature in mine.signatures(layer, gpu):
        assert mine.refuses(layer, signature, gpu) is None
        for config in mine.configs(layer, signature, gpu):
            ((got,), _) = compute(gpu, layer, arrays, signature, mine.plan(layer, signature, config, gpu))
            assert np.abs(got.astype(int) - want.astype(int)).max() <= 1, (signature, config)
            assert (got != want).mean() < 0.01, (signature, config)
            tried += 1
    assert tried >= 4

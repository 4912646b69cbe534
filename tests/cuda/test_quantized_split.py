"""8-bit convolutions split over blocks along K, and with slots for every step: offered for few pixels, correct on a GPU."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, reference

from whet.composites.quantized import make_conv_body_builder, make_quantized_sample
from whet.ops import sample_layer
from whet.tactics import list_tactics

QCONV = next(t for t in list_tactics("cuda") if t.name == "cuda/qconv")
MOST = 12  # configurations of each kind that are run


def case(c, k, taps, size, stored, added):
    rng = np.random.default_rng(c + k + taps)
    weights = rng.integers(-127, 128, (k, c, taps, taps)).astype(np.int8)
    scale, step = rng.uniform(0.5, 2, k).astype(np.float32) / 90 / np.sqrt(c * taps * taps).astype(np.float32), 0.05
    data = [(f"full u8[1,{c},{size},{size}]", 0.02, 0, 1), (weights, scale, None, 0), rng.standard_normal(k).astype(np.float32)]
    data += [(f"full {added}[1,{k},{size},{size}]", 0.02, 0, 1)] if added else []
    return make_quantized_sample("Conv", data, make_conv_body_builder("Relu", pads=(taps // 2,) * 4), (step, 0, stored) if stored else None)


CASES = {
    "3x3, 256 channels": case(256, 256, 3, 14, "u8", ""),
    "3x3, 128 channels, residual": case(128, 128, 3, 28, "u8", "u8"),
    "1x1, 2048 channels": case(2048, 512, 1, 7, "u8", ""),
    "1x1, 1024 channels, floats": case(1024, 256, 1, 14, None, ""),
    "1x1, 512 channels, residual": case(512, 256, 1, 9, "i8", "i8"),
}


def split_case(name):
    """The network of a case (it keeps its layer alive), the layer, its arrays, signature, split-K configurations, and those with own slots."""
    net, layer, arrays = sample_layer("Fused", CASES[name])
    signature = QCONV.signatures(layer, HOPPER)[0]
    found = [dict(c) for c in QCONV.configs(layer, signature, HOPPER)]
    split, once = ([c for c in found if c.get("sk", 1) > 1], [c for c in found if c.get("once")])
    return net, layer, arrays, signature, split, once


@pytest.mark.parametrize("name", CASES)
def test_few_pixels_have_split_and_own_slot_configurations(name):
    _, _, _, _, split, once = split_case(name)
    assert split
    assert once


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_split_and_own_slot_configurations_match_the_reference(gpu, name):
    _, layer, arrays, signature, split, once = split_case(name)
    want = reference(layer, arrays)[0]
    for config in [*split[:MOST], *once[:MOST]]:
        (got,), _ = compute(gpu, layer, arrays, signature, QCONV.plan(layer, signature, tuple(config.items()), gpu))
        if want.dtype.kind == "f":
            assert np.abs(got - want).max() <= 2e-3 * np.abs(want).max(), config
        else:
            off = np.abs(got.astype(np.int64) - want.astype(np.int64))
            assert off.max() <= 1, config
            assert (off > 0).mean() < 1e-3, config
    assert np.unique(want).size > 20, "results of many values"

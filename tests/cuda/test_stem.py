"""Stems that read the image directly: padding of filter rows, loads of pixel pairs, and on a GPU the results."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_few_channel_conv import layer_of
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from whet.ops import OPS, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.stem.stem import count_float_taps, make_stem_constants

TACTIC = get_tactic("cuda/stem")
POOLED = get_tactic("cuda/stem_pool")
# : image, filters, attributes, taps of a padded row, and whether pixels of an f32 image, channels first, are loaded in pairs
CASES = [
    ((2, 3, 40, 72), (32, 6, 6), {"pads": (2, 2, 2, 2), "strides": (2, 2)}, 6, True),
    ((1, 3, 31, 44), (64, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}, 8, False),
    ((2, 3, 18, 34), (16, 3, 3), {"pads": (0, 0, 0, 0), "strides": (2, 2)}, 4, True),
    ((1, 3, 19, 37), (24, 3, 3), {"pads": (1, 1, 1, 1)}, 4, False),
    ((1, 4, 22, 35), (40, 4, 5), {"pads": (1, 2, 1, 2), "strides": (2, 2)}, 6, False),
    ((2, 1, 25, 30), (8, 5, 5), {"pads": (2, 2, 2, 2), "strides": (1, 2)}, 8, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_taps_have_minimal_padding(case):
    *given, taps, pairs = case
    layer, arrays = layer_of(*given, False)
    s = get_conv_shape(layer)
    assert count_float_taps(s) == taps
    for signature in TACTIC.signatures(layer, HOPPER):
        image = signature.inputs[0]
        made = make_stem_constants(s, {"th": 8, "tw": 16, "blocks": 2}, "silu", image, signature.outputs[0].dtype.name)
        assert made["PAIRS"] == (pairs and image.format == "linear" and image.dtype.name == "f32")
        kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
        rows = kernel.packed[0].make().view(signature.outputs[0].dtype.numpy).reshape(s.k, -1)[:, : s.r * taps * 4].reshape(s.k, s.r, taps, 4)
        np.testing.assert_allclose(rows[:, :, : s.s, : s.c].astype(np.float32).transpose(0, 3, 1, 2), arrays[1], rtol=1e-2, atol=1e-2)
        assert not rows[:, :, s.s :].any()
        assert not rows[..., s.c :].any()


def check(gpu, tactic, layer, arrays):
    for signature in tactic.signatures(layer, gpu):
        if tactic.refuses(layer, signature, gpu):
            continue
        for config in first_configs(tactic, layer, signature, gpu, 2):
            kernel = tactic.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{tactic.name} {signature} {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case[:3], False)
    check(gpu, TACTIC, layer, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("i", [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "ConvPool"])
def test_pooled_results_match_the_reference(gpu, i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    if POOLED.why_not(layer):
        pytest.skip("on integers")
    check(gpu, POOLED, layer, arrays)

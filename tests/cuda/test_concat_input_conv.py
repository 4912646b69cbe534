"""Concat-input 1x1 convolutions: order of the packed weights, and the cases in which the builder forms them."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.network import parse_network
from whet.ops import OPS, run_regions, sample_layer
from whet.tactics import list_tactics
from whet.tactics.cuda.conv.concat_input_conv import match_concat_input
from whet.tactics.cuda.conv.conv import from_config

HOPPER = CompileOnlyGpu()
SAMPLES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "ConcatInputConv"]
TACTIC = next(t for t in list_tactics("cuda") if "ConcatInputConv" in t.composites)


def steps_of(x, bk):
    """The channels that the copy engine loads into K steps of `bk` channels: [pixels, steps * bk], zero-filled after the last channel."""
    rows = np.moveaxis(x, 1, -1).reshape(-1, x.shape[1]).astype(np.float64)
    return np.pad(rows, ((0, 0), (0, -x.shape[1] % bk)))


@pytest.mark.parametrize("i", SAMPLES)
def test_packed_weights_meet_the_channels_of_both_images(i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    found = match_concat_input(layer)
    signature = TACTIC.signatures(layer, HOPPER)[0]
    config = TACTIC.configs(layer, signature, HOPPER)[0]
    kernel, tile = TACTIC.plan(layer, signature, config, HOPPER), from_config(config)
    a, b = (arrays[k] for k in found.images)
    rows = np.concatenate([steps_of(a, tile.bk), steps_of(b, tile.bk)], axis=1)
    k, wide = found.shape.k, rows.shape[1]
    if found.parts is None:
        w = kernel.packed[0].make().view(signature.outputs[0].dtype.numpy).reshape(k, wide).astype(np.float64)
    else:
        packed = kernel.packed[0].make().view(np.int8).reshape(-1, wide).astype(np.float64)
        w = packed.reshape(-1, 4, 4, 2, wide).transpose(0, 2, 1, 3, 4).reshape(-1, wide)[:k]  # rows in groups of 32, permuted over lanes
    plain = np.concatenate([np.moveaxis(x, 1, -1).reshape(rows.shape[0], -1) for x in (a, b)], axis=1).astype(np.float64)
    wanted = plain @ np.asarray(found.weights.array(), np.float64).reshape(k, -1).T
    np.testing.assert_allclose(rows @ w.T, wanted, rtol=1e-3, atol=1e-2 * np.abs(wanted).max())
    assert wide == found.steps() * tile.bk


@pytest.mark.parametrize("i", SAMPLES)
def test_its_parts_compute_the_same_result(i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    (want,) = run_regions(layer, arrays)
    assert want.shape[1] == match_concat_input(layer).shape.k
    assert np.unique(want).size > 20


NET = """network neck source
in %x: f32[2,32,20,20]
const %w0: f32[32,32,3,3] = seed(1)
const %w1: f32[64,32,3,3] = seed(2)
const %w2: f32[64,96,1,1] = seed(3)
const %w3: f32[32,96,1,1] = seed(4)
%a = Conv(%x, %w0, pads=(1, 1, 1, 1)) from "left"
%b = Conv(%x, %w1, pads=(1, 1, 1, 1)) from "right"
%c = Concat(%a, %b, axis=1) from "join"
%d = Conv(%c, %w2) from "first"
%e = Sigmoid(%d)
%f = Conv(%c, %w3) from "second"
out %e
out %f
"""


def test_inputs_are_not_concatenated_if_both_readers_read_the_parts(standin_gpu):
    config = BuildConfig(backend="cuda", precisions=("fp16",), timing_cache="", verify=False, avg_timing=1)
    plan = build(parse_network(NET), config)
    assert [x.composite for x in plan.network.layers].count("ConcatInputConv") == 2
    assert "Concat" not in {x.op for x in plan.network.layers}
    assert all(plan.choices[x.name].tactic == "cuda/concat_input_conv" for x in plan.network.layers if x.composite == "ConcatInputConv")

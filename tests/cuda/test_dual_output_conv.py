"""Dual-output 1x1 convolutions: packed weights, tiles split at the boundary of the outputs, and the cases in which the builder forms them."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_concat_input_conv import HOPPER, steps_of

from support.standin_gpu import StandInGpu
from whet.backends.cuda.compile import compile_cubin
from whet.builder import BuildConfig, build
from whet.network import parse_network
from whet.ops import OPS, run_regions, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda.conv._conv import SecondOutput
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import from_config
from whet.tactics.cuda.conv.dual_output_conv import match_dual_output

SAMPLES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "DualOutputConv"]
TACTIC = get_tactic("cuda/dual_output_conv")


@pytest.mark.parametrize("i", SAMPLES)
def test_packed_weights_are_those_of_both(i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    found, signature = match_dual_output(layer), TACTIC.signatures(layer, HOPPER)[0]
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
    rows = np.concatenate([steps_of(arrays[i], found.bk) for i in found.images], axis=1)
    assert rows.shape[1] == found.steps * found.bk
    k = sum(w.shape.k for w in found.ways)
    got = rows @ kernel.packed[0].make().view(np.float16).reshape(k, -1).astype(np.float64).T + kernel.packed[1].make().view(np.float32)[:k]
    whole = np.concatenate([np.moveaxis(arrays[i], 1, -1).reshape(rows.shape[0], -1) for i in found.images], axis=1).astype(np.float64)
    for way, sums in zip(found.ways, np.split(got, [found.at], axis=1), strict=True):
        want = whole @ np.asarray(way.weights.array(), np.float64).reshape(way.shape.k, -1).T + np.asarray(way.bias.array(), np.float64)
        np.testing.assert_allclose(sums, want, rtol=1e-3, atol=1e-2 * np.abs(want).max())


@pytest.mark.parametrize("i", SAMPLES)
def test_no_panel_of_a_tile_spans_both_outputs(i):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    found, signature = match_dual_output(layer), TACTIC.signatures(layer, HOPPER)[0]
    tiles = [from_config(c) for c in TACTIC.configs(layer, signature, HOPPER)]
    assert len(tiles) > 4
    for tile in tiles:
        panel = SecondOutput.panel(found.at, tile)
        assert panel in (16, 32, 64)
        assert not tile.bn % panel
        assert not found.at % panel
    one, other = run_regions(layer, arrays)
    assert (one.shape[1], other.shape[1]) == (found.at, found.ways[1].shape.k)


@pytest.mark.parametrize(
    ("tile", "pair"),
    [
        (ConvConfig(2, 1, 64, bk=32, stages=2, blocks=3, outs=2, hold=1), 0),
        (ConvConfig(2, 1, 64, stages=4, direct=1), 1),
        (ConvConfig(1, 1, 32, stages=4, sk=2), 0),
    ],
    ids=str,
)
def test_machine_code(tile, pair, tmp_path):
    text = sass(compile_cubin(emit_conv_source(tile, Features(activation="silu", pair=pair, fork=SecondOutput.panel(32, tile)))), tmp_path)
    stores = len(re.findall(r"\bUTMASTG\b", text))
    assert stores >= 2 if not tile.direct and tile.sk == 1 else stores == 0, "each panel of a tile is stored to the output of its channels"
    assert "MUFU.TANH" in text
    assert "MUFU.EX2" not in text, "one special function for SiLU"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


NET = """network block source
in %x: f32[2,64,20,20]
const %w0: f32[32,64,1,1] = seed(1)
const %w1: f32[48,64,1,1] = seed(2)
const %w2: f32[32,80,1,1] = seed(3)
const %w3: f32[32,80,1,1] = seed(4)
%a = Conv(%x, %w0) from "first"
%b = Relu(%a)
%c = Conv(%x, %w1) from "second"
%d = Relu(%c)
%e = Concat(%b, %d, axis=1)
%f = Conv(%e, %w2) from "third"
%g = Conv(%e, %w3) from "fourth"
out %f
out %g
"""


def build_plan(*passes, precisions=("fp16",), tactic_sources=(), max_tactics=-1):
    config = BuildConfig(
        backend="cuda",
        precisions=precisions,
        timing_cache="",
        verify=False,
        avg_timing=1,
        passes=passes,
        tactic_sources=tactic_sources,
        max_tactics=max_tactics,
    )
    return build(parse_network(NET), config)


def test_a_network_reads_its_input_once(standin_gpu):
    plan = build_plan()
    forked = [x for x in plan.network.layers if x.composite == "DualOutputConv"]
    assert len(forked) == 2
    assert all(plan.choices[x.name].tactic == "cuda/dual_output_conv" for x in forked)
    assert len([x for x in plan.network.layers if x.op != "Reformat"]) == 2


def test_32_bit_options_do_not_displace_16_bit_options(standin_gpu, monkeypatch):
    """The number of options of a layer is capped if candidates are compiled ahead; both forms exist in 32 bits as parts."""
    monkeypatch.setattr(StandInGpu, "capabilities", replace(StandInGpu.capabilities, compiles_ahead=True))
    plan = build_plan(max_tactics=12)
    layers = [x for x in plan.network.layers if x.composite == "DualOutputConv"]
    assert layers
    for x in layers:
        rows = plan.report.candidates[x.name]
        assert not any(r.tactic == "cuda/multi_tensor_conv_tf32" and r.ms is not None for r in rows)
        offered = TACTIC.configs(x, TACTIC.signatures(x, HOPPER)[0], HOPPER)
        assert sum(r.tactic == "cuda/dual_output_conv" and r.ms is not None for r in rows) == min(len(offered), 12)


def test_in_fp32_without_tf32_dual_output_and_concat_input_layers_are_unfused(standin_gpu):
    net = build_plan(precisions=(), tactic_sources=("-conv_tf32", "-multi_tensor_conv_tf32")).network
    kinds = [x.composite or x.op for x in net.layers if x.op != "Reformat"]
    assert kinds.count("Conv") == 4
    assert set(kinds) == {"Concat", "Conv"}

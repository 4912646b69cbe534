"""Warpgroups that compute tiles in turns: candidates for many rows, shared memory that fits, and on a GPU each of them against the reference."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from whet.backends.cuda.compile import compile_cubin
from whet.composites._two_four_samples import matmul
from whet.composites.epilogue import conv_sample
from whet.composites.norm_then_product import norm_then_product_sample
from whet.ops import sample_layer
from whet.tactics._base import get_tactic
from whet.tactics.cuda.conv._conv_config import ConvConfig, configs_for
from whet.tactics.cuda.conv._conv_launch import Features, conv_source
from whet.tactics.cuda.conv.conv import as_config, from_config

ROWS = "f32[2,96,90,90]"
LAYERS = {
    "residual": ("cuda/conv", conv_sample(ROWS, "f32[200,96,1,1]", "Relu", before="f32[2,200,90,90]")),
    "taps": ("cuda/conv", conv_sample("f32[2,64,90,90]", "f32[640,64,3,3]", "Relu", pads=(1, 1, 1, 1), strides=(2, 2))),
    "late residual": ("cuda/conv", conv_sample(ROWS, "f32[136,96,1,1]", "silu", after="f32[2,136,90,90]")),
    "product": ("cuda/gemm", matmul("f32[9000,320]", 264, "Gelu")),
    "norm": ("cuda/norm_gemm", norm_then_product_sample("f32[9000,192]", 520, act="Gelu")),
}


def test_they_are_candidates_for_many_rows_only():
    many, few = (configs_for(m, 768, 768, 1, 132) for m in (6304, 197))
    assert any(c.alternate for c in many)
    assert not any(c.alternate for c in few)
    for c in many:
        assert c.valid()
        assert from_config(as_config(c)) == c


def test_each_warpgroup_has_a_tile_of_results():
    together, alone = ConvConfig(2, 1, 128, stages=4), ConvConfig(2, 1, 128, stages=4, alternate=1)
    assert (together.bm, alone.bm) == (128, 64)
    assert together.shared - alone.shared == 4 * 64 * 128  # four stages of 64 rows less; the results are as many


@pytest.mark.parametrize("tile", [ConvConfig(2, 2, 128, stages=5, alternate=1), ConvConfig(2, 1, 192, stages=5, alternate=1)], ids=str)
@pytest.mark.parametrize("features", [Features(activation="gelu"), Features(im2col=True, activation="silu"), Features(norm=1)], ids=str)
def test_machine_code_has_no_spills(tile, features, tmp_path):
    text = sass(compile_cubin(conv_source(tile, features), name="alternate.cu"), tmp_path)
    assert "HGMMA" in text
    assert "LDL" not in text
    assert "STL" not in text


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_many_rows_have_them(name):
    tactic, layer = get_tactic(LAYERS[name][0]), sample_layer("Fused", LAYERS[name][1])[1]
    signature = tactic.signatures(layer, HOPPER)[0]
    assert any(dict(c).get("alternate") for c in tactic.configs(layer, signature, HOPPER))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_every_tile_matches_the_reference(gpu, name):
    tactic, (layer, arrays) = get_tactic(LAYERS[name][0]), sample_layer("Fused", LAYERS[name][1])[1:]
    for signature in tactic.signatures(layer, gpu):
        want = None
        for config in tactic.configs(layer, signature, gpu):
            if not dict(config).get("alternate"):
                continue
            kernel = tactic.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            want = reference(layer, fed)[0] if want is None else want
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")

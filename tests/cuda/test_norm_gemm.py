"""A normalization and the product that reads it in one launch: the algebra of its packed weights, its machine code, and on a GPU every tile."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from whet.backends.cuda.compile import compile_cubin
from whet.composites.norm_then_product import make_norm_product_sample
from whet.ops import sample_layer
from whet.tactics._base import PlanRefused, get_tactic
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config
from whet.tactics.cuda.gemm.norm_gemm import match_norm_and_product

TACTIC = get_tactic("cuda/norm_gemm")


def layer_of(*args, **how):
    return sample_layer("Fused", make_norm_product_sample(*args, **how))[1:]


@pytest.mark.parametrize("how", [{}, {"op": "Gemm", "act": "Relu"}, {"rms": True}], ids=str)
def test_packed_weights_compute_the_same(how):
    layer, arrays = layer_of("f32[6,48]", 24, **how)
    signature = next(s for s in TACTIC.signatures(layer, HOPPER) if s.outputs[0].dtype.name == "f16")
    weights, bias, sums = (p.make() for p in TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER).packed)
    w = weights.view(np.float16).reshape(24, 48).astype(np.float64)
    x = arrays[0].astype(np.float64) + 3
    mean = 0 if how.get("rms") else x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    y = (x @ w.T - mean * sums.view(np.float32)[:24]) * scale + bias.view(np.float32)[:24]
    want = reference(layer, [x.astype(np.float32), *arrays[1:]])[0]
    np.testing.assert_allclose(np.maximum(y, 0) if how.get("act") else y, want, rtol=0, atol=2e-3 * np.abs(want).max())


def test_rows_without_whole_steps_are_refused():
    layer, _ = layer_of("f32[6,96]", 24)
    signature = TACTIC.signatures(layer, HOPPER)[0]
    assert {dict(c)["bk"] for c in TACTIC.configs(layer, signature, HOPPER)} == {32}
    with pytest.raises(PlanRefused, match="no tile of 96 channels"):
        TACTIC.plan(layer, signature, as_config(ConvConfig(1, 1, 32, 64, 4, direct=1)), HOPPER)
    odd, _ = layer_of("f32[6,24]", 24)
    assert "multiple of 16" in TACTIC.refuses(odd, TACTIC.signatures(odd, HOPPER)[0], HOPPER)


def test_odd_widths_are_candidates_where_they_fill_one_round_of_blocks():
    def list_widths(rows, columns):
        layer, _ = layer_of(f"f32[{rows},768]", columns)
        signature = TACTIC.signatures(layer, HOPPER)[0]
        return {dict(c)["bn"] for c in TACTIC.configs(layer, signature, HOPPER)}

    assert {80, 96} <= list_widths(197, 2304)  # 4 x 29 and 4 x 24 blocks for 132 multiprocessors
    assert not {48, 80, 96} & list_widths(64, 64)


def test_a_norm_over_several_axes_is_not_taken():
    layer, _ = layer_of("f32[2,6,48]", 24)
    layer.regions["body"].layers[0].attrs["axis"] = 1
    assert "last axis" in match_norm_and_product(layer)


@pytest.mark.parametrize("tile", [
    ConvConfig(1, 1, 32, stages=4, sk=4), ConvConfig(1, 1, 64, stages=3, sk=4, once=3), ConvConfig(1, 1, 64, stages=6, direct=1),
    ConvConfig(2, 1, 128, stages=4), ConvConfig(2, 2, 96, stages=3), ConvConfig(2, 1, 96, bk=32, stages=2, hold=3, outs=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("norm", [1, 2])
def test_machine_code_has_no_spills(tile, norm, tmp_path):
    text = sass(compile_cubin(emit_conv_source(tile, Features(activation="gelu", norm=norm)), name="norm.cu"), tmp_path)
    assert "HGMMA" in text
    assert "LDL" not in text
    assert "STL" not in text


SHAPES = [
    ("f32[128,768]", 2304, {}), ("f32[197,768]", 3072, {"act": "Gelu"}), ("f32[3,70,384]", 136, {"residual": True}),
    ("f32[2,28,28,96]", 384, {"act": "Gelu"}), ("f32[300,208]", 64, {"op": "Gemm"}), ("f32[60,2048]", 512, {"rms": True}),
    ("f32[6400,192]", 576, {"act": "Gelu"}), ("f32[20000,96]", 64, {"residual": True}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "columns", "how"), SHAPES, ids=str)
def test_every_tile_matches_the_reference(gpu, x, columns, how):
    layer, arrays = layer_of(x, columns, **how)
    rows = np.random.default_rng(0).uniform(-12, 12, (*arrays[0].shape[:-1], 1)).astype(np.float32)  # means of rows far from 0
    for moved in (arrays, [arrays[0] + rows, *arrays[1:]]):
        for signature in TACTIC.signatures(layer, gpu):
            for config in first_configs(TACTIC, layer, signature, gpu, 8):
                kernel = TACTIC.plan(layer, signature, config, gpu)
                got, fed = compute(gpu, layer, moved, signature, kernel)
                # a row's rounding to 16 bits is the input's, not the kernel's: the reference reads the rounded rows
                judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")

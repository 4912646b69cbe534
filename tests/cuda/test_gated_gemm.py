"""A product and the Mul by its gate in one launch: machine code, refusals, and on a GPU every tile."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from whet.backends.cuda.compile import compile_cubin
from whet.composites.gated_product import gated_product_sample
from whet.ops import sample_layer
from whet.tactics._base import get_tactic
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.gemm.gated_gemm import match_product_and_gate

TACTIC = get_tactic("cuda/gated_gemm")


def layer_of(*args, **how):
    return sample_layer("Fused", gated_product_sample(*args, **how))[1:]


def test_the_gate_is_the_input_that_is_multiplied():
    layer, _ = layer_of("f32[6,48]", 24, bias=True, act="silu")
    both = match_product_and_gate(layer)
    assert (both.x, both.gate) == (0, 3)
    assert (both.epilogue.post_ops.activation[0], both.epilogue.post_ops.residual) == ("silu", 2)
    signature = TACTIC.signatures(layer, HOPPER)[0]
    assert [i for i, o in enumerate(signature.inputs) if o is not None] == [0, 3]


def test_a_sum_is_no_gate():
    layer, _ = layer_of("f32[6,48]", 24)
    layer.regions["body"].layers[-1].op = "Add"
    assert "not a product and a Mul" in match_product_and_gate(layer)


TILES = [
    ConvConfig(1, 1, 64, stages=4, sk=4), ConvConfig(1, 1, 64, stages=6, direct=1), ConvConfig(2, 1, 256, stages=3), ConvConfig(3, 1, 192, stages=3),
]  # fmt: skip


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_machine_code_has_no_spills(tile, tmp_path):
    text = sass(compile_cubin(emit_conv_source(tile, Features(activation="silu", gated=True)), name="gated.cu"), tmp_path)
    assert "HGMMA" in text
    assert "LDL" not in text
    assert "STL" not in text


SHAPES = [("f32[512,256]", 704, {}), ("f32[4100,192]", 320, {"act": "Gelu", "bias": True}), ("f32[70,1024]", 136, {"op": "Gemm", "act": "Relu"})]


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "columns", "how"), SHAPES, ids=str)
def test_every_tile_matches_the_reference(gpu, x, columns, how):
    layer, arrays = layer_of(x, columns, **how)
    for signature in TACTIC.signatures(layer, gpu):
        for config in TACTIC.configs(layer, signature, gpu):
            kernel = TACTIC.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")

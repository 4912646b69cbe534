"""Tiles of 192 rows and channels: the loading warpgroup gives registers to those that multiply. Its machine code, and on a GPU its results."""

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from dataclasses import replace

from test_compile import sass
from test_large import conv
from test_tactics import HOPPER, compute, judge, reference

from whet.backends.cuda.compile import compile_cubin
from whet.composites.norm_then_product import make_norm_product_sample
from whet.composites.quantized import make_quantized_sample
from whet.ops import sample_layer
from whet.tactics._base import get_tactic
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config

TILE = ConvConfig(3, 1, 192, stages=3)


def test_only_tiles_with_many_accumulators_reallocate():
    assert TILE.valid()
    assert (TILE.threads, TILE.register_limit) == (512, 160)
    assert TILE.threads * 128 <= 65536, "registers at the start"
    assert not replace(TILE, blocks=2, stages=2).valid()
    few = replace(TILE, bn=128)
    assert (few.threads, few.reallocate) == (416, 0)
    assert not replace(TILE, size=1).reallocate
    assert not replace(TILE, sk=2).reallocate


INSTANCES = [Features(activation="gelu"), Features(activation="gelu", norm=1), Features(im2col=True, activation="silu")]


@pytest.mark.parametrize("features", INSTANCES, ids=str)
def test_machine_code_has_no_spills(features, tmp_path):
    text = sass(compile_cubin(emit_conv_source(TILE, features), name="conv.cu"), tmp_path)
    assert text.count("USETMAXREG") == 2
    assert "LDL" not in text
    assert "STL" not in text


def norm_and_product(x, columns, **how):
    return "cuda/norm_gemm", make_norm_product_sample(x, columns, **how)


LAYERS = {
    "gelu": norm_and_product("f32[6410,192]", 1144, act="Gelu"),  # the last tile has rows and channels that do not exist
    "residual": norm_and_product("f32[6304,768]", 768, residual=True),
    "root mean square": norm_and_product("f32[300,1024]", 192, rms=True),
    "3x3": (
        "cuda/conv",
        make_quantized_sample(
            "Conv", ["f32[8,64,29,31]", "const f32[192,64,3,3]", "const f32[192]", "f32[8,192,29,31]"], conv(add=True, relu=True, pads=(1,) * 4), None
        ),
    ),
}  # fmt: skip


def planned_layer(name, machine, stages=3):
    """The layer, its arrays, and (signature, kernel) of each type with the tile."""
    tactic_name, sample = LAYERS[name]
    tactic, config = get_tactic(tactic_name), as_config(replace(TILE, stages=stages))
    _, layer, arrays = sample_layer("Fused", sample)
    return layer, arrays, [(s, tactic.plan(layer, s, config, machine)) for s in tactic.signatures(layer, machine)]


def test_rows_that_fill_the_multiprocessors_have_the_tile():
    layer, _, ((signature, _), *_) = planned_layer("residual", HOPPER)
    assert as_config(TILE) in get_tactic("cuda/norm_gemm").configs(layer, signature, HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", LAYERS)
def test_results_match_the_reference(gpu, name, stages):
    layer, arrays, kernels = planned_layer(name, gpu, stages)
    for signature, kernel in kernels:
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {kernel.implementation}")

"""Depthwise convolutions in tiles: tiles that fit the registers, machine code without spills for many taps, and on a GPU every tile."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from whet.backends.cuda.compile import compile_cubin
from whet.composites.epilogue import make_conv_sample
from whet.ops import sample_layer
from whet.tactics._base import PlanRefused, get_tactic
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.depthwise._depthwise_tile import list_tiles, make_constants

TACTIC = get_tactic("cuda/depthwise")


def shape_of(n, size, c, taps, stride=1):
    return ConvShape(n, size, size, c, c, taps, taps, (stride,) * 2, (taps // 2,) * 4)


def layer_of(n, size, c, taps, stride=1, act="Relu"):
    attrs = {"group": c, "strides": (stride,) * 2, "pads": (taps // 2,) * 4}
    return sample_layer("Fused", make_conv_sample(f"f32[{n},{c},{size},{size + 3}]", f"f32[{c},1,{taps},{taps}]", act, **attrs))[1:]


@pytest.mark.parametrize(("n", "size", "c"), [(32, 56, 96), (1, 56, 96), (1, 14, 384), (32, 7, 768)])
def test_tiles_of_many_taps_fit(n, size, c):
    s = shape_of(n, size, c, 7)
    tiles = list_tiles(s, 2, 132)
    assert len(tiles) >= 8
    for t in tiles:
        assert t.vec == 2
        assert t.blocks * (t.shared(s, 2) + 1024) <= 228 * 1024
        quarter = -(-t.blocks * t.threads // 128)  # warps of a quarter of a multiprocessor
        assert quarter * t.registers(s) <= 512


@pytest.mark.parametrize(
    ("n", "size", "c", "taps", "stride", "least", "most"),
    [(1, 24, 960, 5, 1, 3, 4), (1, 48, 336, 5, 1, 3, 4), (1, 14, 240, 5, 1, 0, 0), (1, 48, 192, 3, 1, 0, 0), (8, 48, 336, 5, 1, 5, 18)],
)
def test_tiles_of_five_taps_compete_on_single_images(n, size, c, taps, stride, least, most):
    layer, _ = layer_of(n, size, c, taps, stride)
    signature = next(s for s in TACTIC.signatures(layer, HOPPER) if s.outputs[0].dtype.name == "f16")
    tiles = [dict(config) for config in TACTIC.configs(layer, signature, HOPPER) if "tall" not in dict(config)]
    assert least <= len(tiles) <= most
    assert all(TACTIC.plan(layer, signature, tuple(config.items()), HOPPER) for config in tiles)


@pytest.mark.parametrize(("taps", "stride"), [(7, 1), (7, 2), (9, 1)])
def test_machine_code_of_many_taps_has_no_spills(taps, stride, tmp_path):
    s = shape_of(8, 28, 96, taps, stride)
    text = sass(
        compile_cubin(emit_kernel_source("depthwise_tile.cu", make_constants(s, list_tiles(s, 2, 132)[0], 1, 1, "clip")), name="d.cu"), tmp_path
    )
    assert text.count("FFMA") >= 2 * taps * taps
    assert "LDL" not in text
    assert "STL" not in text


def test_filters_beyond_the_registers_are_refused():
    layer, _ = layer_of(1, 30, 32, 11)
    f16, f32 = (next(s for s in TACTIC.signatures(layer, HOPPER) if s.outputs[0].dtype.name == name) for name in ("f16", "f32"))
    assert "81 taps" in TACTIC.refuses(layer, f16, HOPPER)
    nine, _ = layer_of(1, 30, 32, 9)
    assert TACTIC.refuses(nine, f16, HOPPER) is None
    assert "7 x 7" in TACTIC.refuses(nine, f32, HOPPER)
    assert all("vec" in dict(c) for c in TACTIC.configs(nine, f16, HOPPER))
    with pytest.raises(PlanRefused, match="taps"):
        TACTIC.plan(layer, f16, TACTIC.configs(nine, f16, HOPPER)[0], HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "size", "c", "taps", "stride", "act"), [
    (1, 56, 96, 7, 1, "Relu"), (4, 28, 192, 7, 1, "silu"), (1, 14, 384, 7, 1, "Relu"), (3, 7, 768, 7, 1, "Gelu"), (2, 31, 48, 7, 2, "Relu"),
    (2, 30, 32, 9, 1, "Relu"), (1, 24, 240, 5, 1, "silu"), (1, 48, 144, 5, 2, "silu"),
])  # fmt: skip
def test_every_tile_matches_the_reference(gpu, n, size, c, taps, stride, act):
    layer, arrays = layer_of(n, size, c, taps, stride, act)
    for signature in TACTIC.signatures(layer, gpu):
        if TACTIC.refuses(layer, signature, gpu):
            continue
        want = None
        for config in first_configs(TACTIC, layer, signature, gpu, 6):
            kernel = TACTIC.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            want = reference(layer, fed)[0] if want is None else want
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            assert np.isfinite(got[0]).all()

"""Few-channel TF32 convolutions by image tiles (few_channel_tf32.cu): weight packing, tap offsets, machine code; on a GPU the results."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_few_channel_conv import layer_of
from test_stem import check
from test_tactics import HOPPER, compute
from test_tf32 import undealt

from whet.backends.cuda.compile import compile_cubin
from whet.ops import run_regions
from whet.tactics import PlanRefused, get_tactic
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.conv.few_channel_conv_tf32 import FewChannelTile

TACTIC = get_tactic("cuda/few_channel_conv_tf32")
# : image, filters, attributes of the convolution, and whether a residual is added after the activation
CASES = [
    ((2, 32, 18, 20), (32, 3, 3), {"pads": (1, 1, 1, 1)}, True),
    ((1, 32, 33, 36), (40, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}, False),
    ((2, 64, 11, 13), (64, 3, 3), {"pads": (1, 1, 1, 1)}, True),
    ((1, 64, 21, 10), (136, 3, 3), {"pads": (0, 1, 2, 0), "strides": (1, 2)}, False),
    ((1, 32, 17, 24), (20, 5, 5), {"pads": (2, 2, 2, 2)}, True),
    ((1, 32, 40, 70), (8, 2, 4), {}, False),
    ((3, 32, 12, 26), (16, 3, 1), {"pads": (1, 0, 1, 0), "strides": (2, 1)}, False),
    ((1, 32, 20, 30), (32, 3, 4), {"pads": (1, 2, 1, 1), "strides": (2, 2)}, False),
]


def planned(case):
    layer, arrays = layer_of(*case)
    (signature,) = TACTIC.signatures(layer, HOPPER)
    assert TACTIC.refuses(layer, signature, HOPPER) is None
    return layer, arrays, signature, get_conv_shape(layer)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_filters_meet_the_pixels_of_their_taps(case):
    layer, arrays, signature, s = planned(case)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
    rows = kernel.packed[0].make().view(np.float32).reshape(-1, s.r * s.s * s.c)
    assert np.all(rows.view(np.uint32) & 0x1FFF == 0), "the tensor cores truncate no bits"
    rows = undealt(rows).astype(np.float64)
    x = np.pad(arrays[0].astype(np.float64), ((0, 0), (0, 0), (s.pad[0], s.pad[2]), (s.pad[1], s.pad[3])))
    window = np.concatenate([x[0, :, i, j] for i in range(s.r) for j in range(s.s)])  # of the first result, taps in order, channels innermost
    want = (arrays[1].astype(np.float64) * x[0, :, : s.r, : s.s]).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(rows[: s.k] @ window, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
    assert not rows[s.k :].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tap_of_a_tile_is_in_its_piece(case):
    """As `place` in few_channel_tf32.cu: the column of the image for a tap is at its offset in the staged piece."""
    layer, _, signature, s = planned(case)
    step, before = s.stride[1], -(-s.pad[1] // s.stride[1])
    for config in TACTIC.configs(layer, signature, HOPPER):
        tile = FewChannelTile.of(config)
        assert tile.why_not(s) is None
        wide, tall = tile.box(s)
        assert tall == (tile.th - 1) * s.stride[0] + s.r
        for tap in range(s.s):
            place, phase = divmod(tap - s.pad[1] + before * step, step)
            assert 0 <= place
            assert place + tile.tw <= wide, "the last result's"
            for q in (0, tile.tw, 3 * tile.tw + 5):  # the piece that holds columns q: (q // tw * tw - before + column) * step + phase
                column = q % tile.tw + place
                assert (q // tile.tw * tile.tw - before + column) * step + phase == q * step - s.pad[1] + tap


def test_refusals():
    for case, said in [
        (((1, 48, 8, 8), (32, 3, 3), {}, False), "48 channels"),
        (((1, 32, 8, 9), (32, 3, 3), {"strides": (2, 2)}, False), "9 pixels per row"),
        (((1, 64, 8, 8), (30, 3, 3), {}, False), "30 output channels"),
        (((1, 64, 8, 8), (64, 1, 1), {}, False), "taps"),
        (((1, 64, 40, 40), (64, 7, 7), {}, False), "shared memory"),
    ]:
        layer, _ = layer_of(*case)
        assert said in TACTIC.refuses(layer, TACTIC.signatures(layer, HOPPER)[0], HOPPER)
    layer, _, signature, _ = planned(CASES[0])
    for config, said in [(FewChannelTile(16, 32, 32, 8, 1).config, "cannot hold"), (FewChannelTile(8, 8, 32, 1, 1).config[:-1], "tf32")]:
        with pytest.raises(PlanRefused, match=said):
            TACTIC.plan(layer, signature, config, HOPPER)


@pytest.mark.parametrize(
    ("s", "tile", "residual"),
    [
        (ConvShape(8, 160, 160, 32, 32, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(16, 16, 32, 4, 1), 2),
        (ConvShape(8, 320, 320, 32, 64, 3, 3, (2, 2), (1, 1, 1, 1)), FewChannelTile(8, 8, 64, 3, 1), 0),
        (ConvShape(8, 80, 80, 64, 64, 3, 3, (1, 1), (1, 1, 1, 1)), FewChannelTile(8, 8, 64, 3, 1), 1),
    ],
    ids=str,
)
def test_machine_code(s, tile, residual, tmp_path):
    assert tile.why_not(s) is None
    silu = PostOps(("silu", 0.0, 0.0), residual)
    text = sass(compile_cubin(emit_kernel_source("few_channel_tf32.cu", tile.constants(s, silu))), tmp_path)
    products = re.findall(rf"HGMMA\.64x{tile.bn}x8\.F32\.TF32", text)
    assert len(products) == s.r * s.s * s.c // 8, "every product once, unrolled"
    assert "UTMALDG.4D" in text, "pieces are loaded by bulk copies"
    assert not re.search(r"\b(LDSM|SHFL\.BFLY)\b", text), "operands are read in place, results are stored without reordering"
    assert text.count("STG.E.128") == tile.bn // 8
    assert ("LDG.E.128" in text) == (residual > 0)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are warp-uniform: no loops over lanes"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case)
    check(gpu, TACTIC, layer, arrays)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        ((2, 32, 40, 48), (32, 3, 3), {"pads": (1, 1, 1, 1)}, True),
        ((2, 32, 64, 80), (64, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}, False),
        ((2, 64, 24, 40), (64, 3, 3), {"pads": (1, 1, 1, 1)}, True),
    ],
    ids=str,
)
def test_every_instance_matches_the_reference(gpu, case):
    layer, arrays = layer_of(*case)
    (signature,) = TACTIC.signatures(layer, gpu)
    want = run_regions(layer, [a.astype(np.float64) for a in arrays])[0]
    for config in TACTIC.configs(layer, signature, gpu):
        got, _ = compute(gpu, layer, arrays, signature, TACTIC.plan(layer, signature, config, gpu))
        error = np.linalg.norm(got[0] - want) / np.linalg.norm(want)
        print(f"{FewChannelTile.of(config)}: {error:.2e}, worst {np.abs(got[0] - want).max() / np.abs(want).max():.2e}")
        assert error <= 4e-4, "operands are rounded to nearest: no shrinking"

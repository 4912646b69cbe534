"""Stems of f32 images in TF32: packed filters against image positions, machine code, and on a GPU the results."""

import re
from itertools import pairwise

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
from whet.tactics._fused import get_source_index
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.stem.stem_tf32 import StemTile, count_leading_pixels, count_padded_channels, count_row_elements, list_taps

TACTIC = get_tactic("cuda/stem_tf32")
SILU = PostOps(("silu", 0.0, 0.0))
#: image, filters, attributes
CASES = [
    ((2, 3, 40, 72), (32, 6, 6), {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
    ((1, 3, 31, 148), (64, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ((3, 3, 18, 36), (16, 3, 3), {"pads": (0, 0, 0, 0), "strides": (2, 2)}),
    ((2, 3, 35, 140), (20, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 1, 25, 32), (40, 5, 4), {"pads": (2, 1, 2, 2), "strides": (3, 2)}),
    ((1, 2, 21, 260), (72, 8, 8), {"pads": (4, 5, 3, 2), "strides": (2, 1)}),
    ((5, 3, 9, 12), (4, 1, 3), {"pads": (0, 1, 0, 1)}),
]


def signature_of(layer):
    (signature,) = TACTIC.signatures(layer, HOPPER)
    assert TACTIC.refuses(layer, signature, HOPPER) is None
    return signature


def plane_places(s, image, r, x):
    """The pixels for the tap of row r and column x, in the kernel's layout: pixels of a phase are adjacent."""
    wide, left, x = np.zeros((s.n, 4, s.h + 32, s.w + 32)), s.pad[1] + count_leading_pixels(s), x + count_leading_pixels(s)
    assert left % 4 == 0, "the copy engine takes pieces of the image from every fourth column on"
    wide[:, : s.c, s.pad[0] : s.pad[0] + s.h, left : left + s.w] = image
    wide[:, 3] = 1
    phase, place = x % s.stride[1], x // s.stride[1]
    plane = wide[..., phase :: s.stride[1]]
    return plane[:, :, r : r + s.p * s.stride[0] : s.stride[0], place : place + s.q]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_filters_match_the_positions_of_a_window(case):
    layer, arrays = layer_of(*case, False)
    s, signature = get_conv_shape(layer), signature_of(layer)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
    packed = kernel.packed[0].make().view(np.float32).reshape(count_padded_channels(s), count_row_elements(s))
    assert np.all(packed.view(np.uint32) & 0x1FFF == 0), "the tensor cores truncate no bits"
    filters = undealt(packed).astype(np.float64).reshape(count_padded_channels(s), -1, 4)
    order = list_taps(s)
    assert sorted(order) == list(range(s.r * s.s))
    assert not filters[s.k :].any()
    if len(order) % 2:
        np.testing.assert_array_equal(filters[:, len(order) - 1], filters[:, len(order)])
        order.append(order[-1])
    assert not filters[:, len(order) :].any()
    sums = np.zeros((s.n, count_padded_channels(s), s.p, s.q))
    for i, tap in enumerate(order):
        sums += np.einsum("kc,nchw->nkhw", filters[:, i], plane_places(s, arrays[get_source_index(layer)], *divmod(tap, s.s)))
    sums = sums[:, : s.k]
    want = run_regions(layer, arrays)[0]
    np.testing.assert_allclose(sums / (1 + np.exp(-sums)), want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_a_bias_keeps_its_bits():
    layer, arrays = layer_of(*CASES[0], False)
    s = get_conv_shape(layer)
    packed = TACTIC.plan(layer, signature_of(layer), StemTile(2, 1, 1).config, HOPPER).packed[0].make()
    packed = packed.view(np.float32).reshape(count_padded_channels(s), count_row_elements(s))
    parts = undealt(packed).reshape(count_padded_channels(s), -1, 4)[: s.k, :3, 3]
    np.testing.assert_array_equal(parts.astype(np.float64).sum(axis=1), arrays[2].astype(np.float64))


@pytest.mark.parametrize(
    "s",
    [
        ConvShape(8, 640, 640, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2)),
        ConvShape(1, 224, 224, 3, 64, 7, 7, (2, 2), (3, 3, 3, 3)),
        ConvShape(128, 32, 32, 3, 16, 3, 3, (1, 1), (1, 1, 1, 1)),
        ConvShape(1, 64, 64, 1, 8, 1, 8, (1, 2)),
    ],
    ids=str,
)
def test_the_second_tap_of_a_step_follows_the_first(s):
    """As `place` in stem_tf32.cu: the descriptor's offset is unsigned."""
    tall, wide = StemTile(4, 1, 1).patch(s)
    pitch = wide // s.stride[1] * 16
    places = [(t // s.s, count_leading_pixels(s) + t % s.s) for t in list_taps(s)]
    at = [x % s.stride[1] * tall * pitch + y * pitch + x // s.stride[1] * 16 for y, x in places]
    assert all(a < b for a, b in pairwise(at))
    assert max(b - a for a, b in pairwise(at)) // 16 < 1 << 14, "fourteen bits of the descriptor"


def test_offered_tiles_fit_a_multiprocessor():
    layer, _ = layer_of(*CASES[0], False)
    s, signature = get_conv_shape(layer), signature_of(layer)
    found = [StemTile.of(c) for c in TACTIC.configs(layer, signature, HOPPER)]
    assert 4 <= len(found) <= 12
    assert all(t.why_not(s) is None for t in found)
    assert all(("math", "tf32") in t.config for t in found), "verification and the table of layers recognize it by this"
    with pytest.raises(PlanRefused, match="tf32"):
        TACTIC.plan(layer, signature, found[0].config[:-1], HOPPER)


def test_refusals():
    for case, said in [
        (((1, 3, 20, 30), (32, 3, 3), {"pads": (1, 1, 1, 1)}), "rows of 30 pixels"),
        (((1, 3, 20, 32), (32, 3, 3), {"pads": (1, 1, 1, 1), "strides": (4, 4)}), "stride 4"),
        (((1, 4, 20, 32), (32, 3, 3), {"pads": (1, 1, 1, 1)}), "4 input"),
        (((1, 3, 20, 32), (30, 3, 3), {"pads": (1, 1, 1, 1)}), "30 output"),
        (((1, 3, 20, 32), (32, 1, 1), {}), "filter 1 x 1"),
    ]:
        layer, _ = layer_of(*case, False)
        assert said in TACTIC.refuses(layer, TACTIC.signatures(layer, HOPPER)[0], HOPPER)


@pytest.mark.parametrize(
    ("tile", "s"),
    [
        (StemTile(4, 1, 3), ConvShape(8, 640, 640, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2))),
        (StemTile(8, 2, 2), ConvShape(8, 640, 640, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2))),
        (StemTile(2, 1, 4), ConvShape(8, 640, 640, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2))),
        (StemTile(2, 1, 2), ConvShape(8, 224, 224, 3, 64, 7, 7, (2, 2), (3, 3, 3, 3))),
        (StemTile(4, 1, 4), ConvShape(8, 32, 32, 3, 16, 3, 3, (1, 1), (1, 1, 1, 1))),
    ],
    ids=str,
)
def test_machine_code(tile, s, tmp_path):
    assert tile.why_not(s) is None
    text = sass(compile_cubin(emit_kernel_source("stem_tf32.cu", tile.constants(s, SILU))), tmp_path)
    products = re.findall(rf"HGMMA\.64x{count_padded_channels(s)}x8\.F32\.TF32", text)
    assert len(products) == -(-s.r * s.s // 2) * tile.th // tile.wgs, "two taps a step, for every row"
    assert "UTMALDG.4D" in text, "the image is loaded by bulk copies"
    assert not re.search(r"\b(LDG|LDSM|SHFL\.BFLY)\b", text), "operands are read in place, results are stored without reordering"
    assert text.count("STG.E.128") == count_padded_channels(s) // 16 * 2 * tile.th // tile.wgs
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are warp-uniform: no loops over lanes"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case, False)
    check(gpu, TACTIC, layer, arrays)


@pytest.mark.gpu
def test_every_instance_of_a_real_size_matches_the_reference(gpu):
    layer, arrays = layer_of((3, 3, 96, 320), (32, 6, 6), {"pads": (2, 2, 2, 2), "strides": (2, 2)}, False)
    (signature,) = TACTIC.signatures(layer, gpu)
    want = run_regions(layer, [a.astype(np.float64) for a in arrays])[0]
    for config in TACTIC.configs(layer, signature, gpu):
        got, _ = compute(gpu, layer, arrays, signature, TACTIC.plan(layer, signature, config, gpu))
        error = np.linalg.norm(got[0] - want) / np.linalg.norm(want)
        print(f"{StemTile.of(config)}: {error:.2e}, worst {np.abs(got[0] - want).max() / np.abs(want).max():.2e}")
        assert error <= 4e-4, "operands are rounded to nearest: no shrinking"


@pytest.mark.gpu
def test_nan_and_infinity_do_not_spread(gpu):
    """NaN reaches only windows that contain it; an infinite pixel reaches no other window."""
    layer, arrays = layer_of((1, 3, 24, 64), (16, 3, 3), {"pads": (1, 1, 1, 1)}, False)
    arrays[get_source_index(layer)][0, 1, 10, 20] = np.float32(np.nan)
    arrays[get_source_index(layer)][0, 2, 3, 40] = np.float32(np.inf)
    (signature,) = TACTIC.signatures(layer, gpu)
    kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, gpu)[0], gpu)
    got, _ = compute(gpu, layer, arrays, signature, kernel)
    assert np.isnan(got[0][0, :, 9:12, 19:22]).all()
    touched = np.zeros((24, 64), bool)
    touched[9:12, 19:22] = touched[2:5, 39:42] = True
    assert np.isfinite(got[0][0][:, ~touched]).all()

"""Stems whose overlapping windows are read in place by the tensor cores: packed filters against image positions, and on a GPU the results."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_few_channel_conv import layer_of, undealt
from test_stem import check
from test_tactics import HOPPER

from whet.backends.cuda.compile import compile_cubin
from whet.network.types import F16, F32
from whet.ops import run_regions
from whet.tactics import get_tactic
from whet.tactics._fused import get_source_index
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.stem.stem_overlap import OverlapTile, count_leading_places, count_padded_channels, count_row_cells, count_row_elements

TACTIC = get_tactic("cuda/stem_overlap")
#: image, filters, attributes
CASES = [
    ((2, 3, 40, 72), (32, 6, 6), {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
    ((1, 3, 31, 148), (64, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ((3, 3, 18, 36), (16, 3, 3), {"pads": (0, 0, 0, 0), "strides": (2, 2)}),
    ((2, 3, 35, 140), (24, 3, 3), {"pads": (1, 1, 1, 1), "strides": (1, 2)}),
    ((1, 1, 25, 32), (40, 5, 4), {"pads": (2, 1, 2, 2), "strides": (3, 2)}),
    ((1, 2, 21, 260), (72, 8, 8), {"pads": (4, 5, 3, 2), "strides": (2, 2)}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_filters_match_the_positions_of_a_window(case):
    layer, arrays = layer_of(*case, False)
    s = get_conv_shape(layer)
    image = arrays[get_source_index(layer)]
    left = s.pad[1] + s.pad[1] % 2 + 2 * count_leading_places(s)
    assert left % 4 == 0
    wide = np.zeros((s.n, 4, s.h + 32, left + s.w + 300))
    wide[:, : s.c, s.pad[0] : s.pad[0] + s.h, left : left + s.w] = image
    wide[:, 3] = 1
    for signature in TACTIC.signatures(layer, HOPPER):
        if TACTIC.refuses(layer, signature, HOPPER):
            continue
        kernel = TACTIC.plan(layer, signature, TACTIC.configs(layer, signature, HOPPER)[0], HOPPER)
        packed = kernel.packed[0].make().view(signature.outputs[0].dtype.numpy).reshape(count_padded_channels(s), count_row_elements(s))
        filters = (
            undealt(packed).astype(np.float64)[:, : s.r * count_row_cells(s) * 8].reshape(count_padded_channels(s), s.r, count_row_cells(s) * 2, 4)
        )
        assert not filters[s.k :].any()
        sums = np.zeros((s.n, count_padded_channels(s), s.p, s.q))
        for r in range(s.r):
            for t in range(count_row_cells(s) * 2):
                x = 2 * count_leading_places(s) + t
                taps = wide[:, :, r : r + s.p * s.stride[0] : s.stride[0], x : x + 2 * s.q : 2][:, :, : s.p, : s.q]
                sums += np.einsum("kc,nchw->nkhw", filters[:, r, t], taps)
        sums = sums[:, : s.k] * 2  # of SiLU: halved
        want = run_regions(layer, arrays)[0]
        np.testing.assert_allclose(sums / (1 + np.exp(-sums)), want, rtol=0.02, atol=0.02 * np.abs(want).max())


def test_offered_tiles_fit_a_multiprocessor():
    layer, _ = layer_of(*CASES[0], False)
    signature = TACTIC.signatures(layer, HOPPER)[0]
    assert TACTIC.refuses(layer, signature, HOPPER) is None
    assert 4 <= len(TACTIC.configs(layer, signature, HOPPER)) <= 16


def test_refusals():
    for case, said in [
        (((1, 3, 20, 30), (32, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}), "rows of 30 pixels"),
        (((1, 3, 20, 32), (32, 3, 3), {"pads": (1, 1, 1, 1)}), "stride 1"),
        (((1, 4, 20, 32), (32, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}), "4 input"),
    ]:
        layer, _ = layer_of(*case, False)
        assert said in TACTIC.refuses(layer, TACTIC.signatures(layer, HOPPER)[0], HOPPER)


@pytest.mark.parametrize(("tile", "image"), [(OverlapTile(4, 1, 4), F32), (OverlapTile(8, 2, 2), F32), (OverlapTile(8, 1, 2), F16)], ids=str)
def test_machine_code(tile, image, tmp_path):
    s = ConvShape(8, 640, 640, 3, 32, 6, 6, (2, 2), (2, 2, 2, 2))
    assert tile.why_not(s, image) is None
    text = sass(compile_cubin(emit_kernel_source("stem_overlap.cu", tile.constants(s, PostOps(("silu", 0.0, 0.0)), image, F16))), tmp_path)
    assert text.count("HGMMA") == 9 * tile.th // tile.wgs, "18 positions, two per step, for every row of a warpgroup"
    assert not re.search(r"\b(LDSM|SHFL\.BFLY)\b", text), "operands are read in place, results are stored without reordering"
    assert text.count("STG.E.128") == 2 * tile.th // tile.wgs
    assert ("LDG.E.128" if image == F32 else "LDG.E.64") in text
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case, False)
    check(gpu, TACTIC, layer, arrays)

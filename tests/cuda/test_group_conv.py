"""Group convolutions on tensor cores: the input window of a tile, packed weights, machine code, and on a GPU real layer sizes."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import compute, judge, planned, reference

from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.ops import Sample, sample_layer
from whet.tactics.cuda.conv._conv import ConvShape, Groups
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.group_conv import group_configs, pack_groups, tile_shape

SHAPES = [  # groups, input and output channels of each
    (32, 4, 4),
    (32, 8, 8),
    (2, 64, 64),
    (4, 24, 24),
    (3, 40, 24),
    (8, 6, 2),
    (5, 8, 16),
    (2, 3, 4),
]


def by_tiles(x, packed, groups, bn, k):
    """The result of conv.cu for pixels x [n, channels] and packed one-tap filters: each tile reads its window, zeros beyond the last channel."""
    out = np.zeros((len(x), k))
    window = packed.shape[-1]
    for n0 in range(0, k, bn):
        first = n0 // groups.k * groups.c // 8 * 8
        seen = x[:, first : first + window]
        out[:, n0 : n0 + bn] = seen @ packed[n0 : n0 + bn, 0, 0, : seen.shape[1]].T
    return out


@pytest.mark.parametrize(("count", "c", "k"), SHAPES)
@pytest.mark.parametrize("bn", [16, 32, 48, 64, 128])
def test_tiles_read_the_window_of_their_groups(count, c, k, bn):
    random = np.random.default_rng(count * c + bn)
    groups, filters = Groups(k, c, count * c), count * k
    w = random.standard_normal((filters, c, 1, 1))
    x = random.standard_normal((7, groups.channels))
    packed = pack_groups(w, groups, bn, 16, np.dtype(np.float64))
    want = np.einsum("ngc,gkc->ngk", x.reshape(7, count, c), w.reshape(count, k, c)).reshape(7, filters)
    np.testing.assert_allclose(by_tiles(x, packed, groups, bn, filters), want, rtol=1e-12, atol=1e-12)
    assert np.count_nonzero(packed) == w.size, "nothing else in the window"


def test_small_groups_share_tiles_and_large_ones_do_not():
    assert Groups(4, 4, 128).window(128, 32) == 32
    assert Groups(64, 64, 512).window(512, 64) == 64
    assert Groups(64, 64, 512).window(512, 128) == 128
    assert Groups(24, 24, 96).window(96, 32) == 48, "a tile over two groups reads both"


@pytest.mark.parametrize(("n", "c", "side"), [(1, 128, 56), (1, 1024, 7), (128, 256, 28), (8, 512, 14)])
def test_every_layer_of_resnext_has_candidates_that_fit(n, c, side):
    shape, groups = ConvShape(n, side, side, c, c, 3, 3, pad=(1, 1, 1, 1)), Groups(c // 32, c // 32, c)
    found = group_configs(shape, groups, 132)
    assert len(found) >= 10
    assert len(set(found)) == len(found)
    for config in found:
        assert config.valid()
        waste = tile_shape(shape, groups, config.bn).c / groups.c
        assert waste <= max(4 * 16 / groups.c, 4), "a tile multiplies few zeros"


GROUPED = [
    (ConvConfig(1, 1, 32, bk=32, stages=4, sk=4), True),
    (ConvConfig(2, 2, 32, bk=32, stages=2, direct=1, halo=2, hold=9), False),
    (ConvConfig(2, 1, 64, stages=4), True),
]


@pytest.mark.parametrize(("config", "im2col"), GROUPED, ids=str)
def test_machine_code(config, im2col, tmp_path):
    text = sass(compile_cubin(emit_conv_source(config, Features(im2col, grouped=True))), tmp_path)
    assert "HGMMA" in text
    assert ("UTMALDG.4D.IM2COL" if im2col else "UTMALDG") in text
    assert not re.search(r"\b(LDL|STL)\b", text)
    assert "BRA.U.ANY" not in text
    assert "R2UR" not in text[text.index("HGMMA") : text.rindex("HGMMA")]


def test_groups_of_one_channel_are_left_to_the_depthwise_kernel():
    from test_tactics import HOPPER, TACTICS

    tactic = next(t for t in TACTICS if t.name == "cuda/group_conv")
    layer, _ = conv(1, 16, 16, 1, 8)
    signature = tactic.signatures(layer, HOPPER)[0]
    assert "depthwise" in tactic.refuses(layer, signature, HOPPER)
    old = CompileOnlyGpu("sm_80")
    assert "Hopper" in tactic.refuses(layer, signature, old)


def conv(n, groups, c, k, side, stride=1, dilation=1):
    """A 3x3 convolution of `groups` groups with c / groups input and k output channels each."""
    shapes = [f"f32[{n},{c},{side},{side}]", f"const f32[{k * groups},{c // groups},3,3]", f"const f32[{k * groups}]"]
    attributes = {"group": groups, "pads": (dilation,) * 4, "strides": (stride,) * 2, "dilations": (dilation,) * 2}
    return sample_layer("Conv", Sample(shapes, attributes))[1:]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [(2, 32, 128, 4, 20), (1, 4, 64, 16, 13, 1, 2), (1, 32, 256, 8, 28, 2), (1, 4, 96, 24, 14), (1, 2, 128, 64, 15), (1, 8, 48, 2, 9)],
    ids=str,
)
def test_real_sizes_match_the_reference(gpu, case):
    layer, arrays = conv(*case)
    ran = 0
    for t, signature, config, kernel in planned(layer, gpu, most=30):
        if t.name == "cuda/group_conv":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            ran += 1
    assert ran >= 10

"""Integer depthwise convolutions by four-byte dot products: packed words of taps and pixels, instances, and large images on a GPU."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute

from support.compiling import first_configs
from whet.backends.cuda.compile import compile_cubin
from whet.composites.quantized import make_quantized_sample
from whet.ops import run_regions, sample_layer
from whet.tactics import list_tactics
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.depthwise._depthwise_tile import Tile
from whet.tactics.cuda.depthwise.depthwise import tile_from
from whet.tactics.cuda.depthwise.qdepthwise_dot import count_words, make_macros, pack_taps
from whet.tactics.cuda.quantized._quantized import get_quantized_conv_shape, match_parts, match_quantized_epilogue

TACTIC = next(t for t in list_tactics("cuda") if t.name == "cuda/qdepthwise_dot")
_rng = np.random.default_rng(4)


def depthwise(n, c, h, w, taps, stride, act, kind="u8", stored=("u8", 6), **attrs):
    """A layer with an integer depthwise convolution without zero point, and its arrays."""
    weights = _rng.integers(-127, 128, (c, 1, taps, taps)).astype(np.int8)
    scales = (_rng.uniform(0.5, 2, c) / (40 * taps * taps)).astype(np.float32)

    def build(body, values):
        y = body.add("Conv", *values, group=c, strides=(stride, stride), pads=(taps // 2,) * 4, **attrs)
        return body.add("Mul", y, body.add("Sigmoid", y)) if act == "silu" else body.add(act, y) if act else y

    data = [(f"full {kind}[{n},{c},{h},{w}]", 0.05, 0, 1), (weights, scales, None, 0), _rng.standard_normal(c).astype(np.float32)]
    _, layer, arrays = sample_layer("Fused", make_quantized_sample("Conv", data, build, (0.02, stored[1], stored[0])))
    return layer, arrays


SHAPES = [
    (1, 32, 12, 15, 3, 1, "Relu", "u8", ("u8", 0)),
    (2, 48, 11, 9, 3, 2, "silu", "i8", ("i8", -100)),
    (1, 32, 14, 14, 5, 1, "silu", "u8", ("u8", 14)),
    (1, 64, 13, 13, 5, 2, "", "u8", ("i8", 3)),
]


def as_the_kernel_does(x, weights, s, tile):
    """Integer accumulators of a row of filters from four-byte words at even pixels of each strip, as in depthwise_dot.cu."""
    kinds, taken = count_words(s, tile)
    words = pack_taps(weights, kinds, taken).astype(np.int64)  # [r][kinds][taken][c][4]
    padded = np.zeros((s.n, s.c, s.h + 2 * s.pad[0] + 8, s.w + 2 * s.pad[1] + 8 * tile.wide), np.int64)
    padded[:, :, s.pad[0] : s.pad[0] + s.h, s.pad[1] : s.pad[1] + s.w] = x
    out = np.zeros((s.n, s.c, s.p, s.q), np.int64)
    for q in range(s.q):
        strip, k = divmod(q, tile.wide)
        start = strip * tile.wide * s.stride[1]
        last = start + (tile.wide - 1) * s.stride[1] + s.s - 1  # the last pixel is repeated beyond it
        for i in range(taken):
            at = [min(start + k * s.stride[1] // 2 * 2 + 4 * i + b, last) for b in range(4)]
            for r in range(s.r):
                rows = padded[:, :, r : r + s.stride[0] * (s.p - 1) + 1 : s.stride[0]]
                w = words[r, k * s.stride[1] % 2 if kinds == 2 else 0, i]
                out[:, :, :, q] += (rows[..., at] * w[None, :, None, :]).sum(-1)
    return out


@pytest.mark.parametrize("wide", [2, 4, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_words_of_taps_meet_words_of_pixels(shape, wide):
    layer, arrays = depthwise(*shape)
    parts = match_parts(layer)
    s, x = get_quantized_conv_shape(parts), np.asarray(arrays[parts.place(parts.head.inputs[0])], np.int64)
    weights = np.asarray(parts.view.inputs[parts.place(parts.head.inputs[1])].array(), np.int8)
    padded = np.pad(x, ((0, 0), (0, 0), *((s.pad[i], s.pad[i]) for i in (0, 1))))
    want = np.zeros((s.n, s.c, s.p, s.q), np.int64)
    for r in range(s.r):
        for t in range(s.s):
            part = padded[:, :, r : r + s.stride[0] * (s.p - 1) + 1 : s.stride[0], t : t + s.stride[1] * (s.q - 1) + 1 : s.stride[1]]
            want += part * weights[None, :, 0, r, t][..., None, None]
    assert np.array_equal(as_the_kernel_does(x, weights, s, Tile(2, 1, 14, wide, 16, 1, 1)), want)


@pytest.mark.parametrize("shape", SHAPES)
def test_instances_compile_without_spills(shape):
    layer, _ = depthwise(*shape)
    parts, (signature,) = match_parts(layer), TACTIC.signatures(layer, HOPPER)
    s = get_quantized_conv_shape(parts)
    for config in TACTIC.configs(layer, signature, HOPPER)[:2]:
        tile = tile_from(config, s, 1)
        text = emit_kernel_source("depthwise_dot.cu", make_macros(parts, match_quantized_epilogue(parts), s, tile, signature))
        assert compile_cubin(text, name="depthwise_dot.cu", arch="sm_90a").startswith(b"\x7fELF")


def test_zero_points_at_padding_are_refused():
    weights = _rng.integers(-127, 128, (32, 1, 3, 3)).astype(np.int8)
    data = [("full u8[1,32,9,9]", 0.02, 7, 1), (weights, np.full(32, 0.01, np.float32), None, 0)]
    sample = make_quantized_sample("Conv", data, lambda body, v: body.add("Conv", *v, group=32, pads=(1,) * 4), (0.05, 0, "u8"))
    _net, layer, _ = sample_layer("Fused", sample)
    assert "zero point" in TACTIC.why_not(layer)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        (4, 96, 57, 55, 3, 1, "Relu", "u8", ("u8", 0)),
        (8, 96, 61, 57, 3, 2, "silu", "u8", ("u8", 14)),
        (7, 240, 29, 27, 5, 1, "silu", "u8", ("i8", -114)),
        (5, 144, 83, 80, 5, 2, "Relu", "i8", ("u8", 0)),
    ],
)
def test_large_images_on_a_gpu(gpu, shape):
    layer, arrays = depthwise(*shape)
    (want,) = run_regions(layer, arrays)
    (signature,) = TACTIC.signatures(layer, gpu)
    assert TACTIC.refuses(layer, signature, gpu) is None
    for config in first_configs(TACTIC, layer, signature, gpu, 4):
        (got,), _ = compute(gpu, layer, arrays, signature, TACTIC.plan(layer, signature, config, gpu))
        off = np.abs(got.astype(int) - want.astype(int))
        assert off.max() <= 1, config
        assert (off > 0).mean() < 0.002, config

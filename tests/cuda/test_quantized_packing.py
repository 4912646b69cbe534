"""Operands packed for 8-bit kernels, against plain arithmetic: rows of weights, biases at borders, limits folded into factors."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.composites.quantized import make_quantized_sample
from whet.network import Layer
from whet.network.types import I8, U8
from whet.ops import sample_layer
from whet.tactics._quantized import Parts
from whet.tactics.cuda.conv._conv import pack_weights8
from whet.tactics.cuda.quantized._quantized import (
    Output,
    compute_factors,
    count_classes,
    fold_into_range,
    folds,
    get_quantized_conv_shape,
    has_border,
    match_parts,
    match_quantized_epilogue,
)
from whet.tactics.cuda.quantized.qconv import merge_pixel_pairs

_rng = np.random.default_rng(11)


def quantized_conv(zero: int, low: float | None, high: float | None, stored: str, stored_zero: int, silu: str = "", **attrs):
    """(parts, weights, bias): a Conv of u8[1,16,7,6] with 24 filters of 3 x 3; `silu` may have a residual "before" or "behind" it."""
    w, bias = _rng.integers(-127, 128, (24, 16, 3, 3)).astype(np.int8), _rng.standard_normal(24).astype(np.float32)

    def build(body, values):
        y = body.add("Conv", *values[:3], **attrs)
        if silu:
            y = body.add("Swish", body.add("Add", y, values[3]) if silu == "before" else y)
            return body.add("Add", y, values[3]) if silu == "behind" else y
        return body.add("Clip", y, *values[3:]) if values[3:] else y

    limits = [] if low is None else [np.asarray(v, np.float32) for v in (low, high)]
    data = [("full u8[1,16,7,6]", 0.02, zero, 1), (w, np.full(24, 0.01, np.float32), None, 0), bias, *limits]
    data += [("full u8[1,24,7,6]", 0.03, 90, 1)] if silu in ("before", "behind") else []
    sample = make_quantized_sample("Conv", data, build, (0.05, stored_zero, stored))
    net, layer, _ = sample_layer("Fused", sample)
    parts = match_parts(layer)
    assert isinstance(parts, Parts), parts
    return net, parts, w, bias


def test_rows_of_weights_give_each_lane_adjacent_channels():
    k, c = 40, 16
    w = np.broadcast_to(np.arange(k, dtype=np.int8)[:, None, None, None], (k, c, 1, 1))
    rows = pack_weights8(w, 32)[:, 0, 0, 0].reshape(2, 4, 4, 2)  # [32s][j][lane of the quad][element]: columns 8j + 2q + e of the product
    for group in range(2):
        for lane in range(4):
            mine = rows[group, :, lane].reshape(-1)
            wanted = np.arange(8) + group * 32 + lane * 8
            assert np.array_equal(mine, np.where(wanted < k, wanted, 0))


@pytest.mark.parametrize("zero", [0, 93])
@pytest.mark.parametrize(("pads", "strides"), [((1, 1, 1, 1), (1, 1)), ((2, 0, 1, 1), (2, 1)), ((0, 0, 0, 0), (1, 2))])
def test_biases_correct_the_zero_point_at_zero_padding(zero, pads, strides):
    _net, parts, w, bias = quantized_conv(zero, None, None, "i8", 0, pads=pads, strides=strides)
    s, made = get_quantized_conv_shape(parts), match_quantized_epilogue(parts)
    found = compute_factors(parts, made, w, s, parts.view.inputs[parts.place(parts.head.inputs[2])])
    assert found.border == has_border(parts, s) == (zero > 0 and any(pads))
    assert len(found.bias) == (count_classes(s) if found.border else 1)
    x = _rng.integers(0, 256, (16, 7, 6))

    def conv(image, fill):
        padded = np.full((16, 7 + pads[0] + pads[2], 6 + pads[1] + pads[3]), fill, np.float64)
        padded[:, pads[0] : pads[0] + 7, pads[1] : pads[1] + 6] = image
        out = np.zeros((24, s.p, s.q))
        for p in range(s.p):
            for q in range(s.q):
                window = padded[:, p * strides[0] : p * strides[0] + 3, q * strides[1] : q * strides[1] + 3]
                out[:, p, q] = (w.astype(np.float64) * window).sum(axis=(1, 2, 3))
        return out

    wanted = conv(x - zero, 0) * 0.02 * 0.01 + bias[:, None, None]
    table = found.bias[found.classes if found.border else np.zeros(s.p * s.q, int)].T.reshape(24, s.p, s.q)
    assert np.allclose(conv(x, 0) * found.factor[:, None, None] + table, wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "stored", "zero"), [(0, 6, "u8", 0), (0, 1e30, "u8", 0), (-1, 3.03, "i8", -20), (None, None, "i8", 7), (0, 1e30, "u8", 250)]
)
def test_folded_limits_combine_the_clip_and_the_integer_range(low, high, stored, zero):
    _net, parts, *_ = quantized_conv(0, low, high, stored, zero, pads=(1, 1, 1, 1))
    made = match_quantized_epilogue(parts)
    assert folds(made, stored)
    per, shift, out, _ = fold_into_range(Output.of(parts, made), made, stored)
    real = np.concatenate([_rng.uniform(-30, 30, 2000), [-1e6, 0, 1e6]])
    unit = np.clip(real * per + shift, 0, 1)
    got = np.rint(unit * out.per_step + (out.zero - 12582912.0))
    bottom, top = (0, 255) if stored == "u8" else (-128, 127)
    clipped = real if low is None else np.clip(real, low, high)
    wanted = np.clip(np.rint(clipped / np.float32(0.05)) + zero, bottom, top)
    assert np.abs(got - wanted).max() <= 1
    assert (got != wanted).mean() < 0.002, "only if a value is halfway between two integers"


@pytest.mark.parametrize(("stored", "zero"), [("u8", 6), ("i8", -121), ("u8", 200)])
@pytest.mark.parametrize("silu", ["alone", "before", "behind"])
def test_silu_in_parts_of_the_range(silu, stored, zero):
    _net, parts, *_ = quantized_conv(0, None, None, stored, zero, silu, pads=(1, 1, 1, 1))
    made = match_quantized_epilogue(parts)
    assert folds(made, stored)
    per, shift, out, post_ops = fold_into_range(Output.of(parts, made), made, stored)
    real, added = np.concatenate([_rng.uniform(-30, 30, 2000), [-1e4, 0, 1e4]]), _rng.integers(0, 256, 2003)
    _, exponent, place = post_ops.activation
    v = real * per + shift + (out.add_step * added if silu == "before" else 0)
    v = v / (1 + np.exp2(np.minimum(v * exponent, 60))) + place + (out.add_step * added if silu == "behind" else 0)
    got = np.rint(np.clip(v, 0, 1) * out.per_step + (out.zero - 12582912.0))
    more = 0.03 * (added - 90.0)
    x = real + (more if silu == "before" else 0)
    y = x / (1 + np.exp(-np.maximum(x, -700))) + (more if silu == "behind" else 0)
    bottom, top = (0, 255) if stored == "u8" else (-128, 127)
    wanted = np.clip(np.rint(y / np.float32(0.05)) + zero, bottom, top)
    assert np.abs(got - wanted).max() <= 1
    assert (got != wanted).mean() < 0.002, "only if a value is halfway between two integers"
    assert post_ops.residual == {"alone": 0, "before": 1, "behind": 2}[silu]


def test_rows_of_24_channels_become_pairs_of_pixels():
    _net, parts, *_ = quantized_conv(0, None, None, "u8", 0)
    s = get_quantized_conv_shape(parts)
    assert merge_pixel_pairs(s) is s
    plain = s.__class__(2, 4, 4, 24, 40)
    assert (merge_pixel_pairs(plain).m, merge_pixel_pairs(plain).c, merge_pixel_pairs(plain).k) == (16, 48, 80)
    odd = s.__class__(1, 3, 3, 24, 40)
    assert merge_pixel_pairs(odd) is odd, "an odd number of pixels"


def test_types_of_samples_are_8_bits():
    _net, parts, *_ = quantized_conv(3, None, None, "i8", 0)
    assert isinstance(parts.view, Layer)
    assert (parts.reads[0].dtype, parts.stores.dtype) == (U8, I8)

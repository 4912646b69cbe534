"""64-channel convolutions with weights as operand A (weights_as_a.cu): candidates, packed filters, machine code."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass

from support.selection import with_long_variants
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.launch import MAX_SHARED
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv._weights_as_a_conv import (
    WeightsAsATile,
    emit_source,
    list_weights_as_a_tiles,
    make_constants,
    pack_weights_as_a,
    why_not_shape,
)

STAGE = ConvShape(128, 56, 56, 64, 64, 3, 3, pad=(1, 1, 1, 1))


@pytest.mark.parametrize("shape", [STAGE, replace(STAGE, k=56)])
def test_candidates_fit_and_cover_every_row(shape):
    found = list_weights_as_a_tiles(shape, True)
    assert {t.rows for t in found} == ({4} if shape is STAGE else {1, 2, 3}), "staging has no pixels beyond the tile; registers"
    for t in found:
        assert t.bn(shape) % 8 == 0
        assert t.bn(shape) <= 256, "one product"
        assert not t.stage(shape) or t.stage(shape) >= t.bn(shape) // t.padded_width(shape) * shape.q * 128
        assert t.shared(shape) <= MAX_SHARED
        assert t.tiles(shape) * t.rows >= shape.n * shape.p
        read = (t.bn(shape) - 1 + 2 * t.padded_width(shape) + 2) * 128 + 128
        assert t.slot(shape) >= read, "the last tap of the last pixel is in the slot"


def test_refusals():
    assert why_not_shape(STAGE) is None
    for other in (ConvShape(128, 56, 56, 128, 128, 3, 3), ConvShape(128, 56, 56, 64, 64), ConvShape(128, 57, 57, 64, 64, 3, 3, (2, 2))):
        assert "takes 64 input" in str(why_not_shape(other))
    assert "even number" in str(why_not_shape(ConvShape(128, 57, 57, 64, 64, 3, 3, pad=(1, 1, 1, 1))))
    assert "too few" in str(why_not_shape(ConvShape(1, 14, 14, 64, 64, 3, 3, pad=(1, 1, 1, 1))))


def test_two_rows_of_a_lane_are_adjacent_channels():
    weights = np.arange(72, dtype=np.float32)[:, None, None, None] * np.ones((1, 64, 1, 1), np.float32)
    packed = pack_weights_as_a(weights, np.dtype(np.float16))
    assert packed.shape == (128, 1, 1, 64)
    rows = packed[:, 0, 0, 0].reshape(8, 2, 8)  # sixteens, row g and row g + 8
    for sixteen, g in np.ndindex(4, 8):
        assert rows[sixteen, :, g].tolist() == [sixteen * 16 + g * 2, sixteen * 16 + g * 2 + 1]
    assert not rows[5:].any(), "beyond the 72 there are zeros"


@pytest.mark.parametrize(
    ("tile", "k", "residual", "activation"),
    with_long_variants(
        [
            (WeightsAsATile(4, 2), 64, 1, "clip"),
            (WeightsAsATile(4, 2), 64, 0, "clip"),
            (WeightsAsATile(4, 2), 64, 2, "silu"),
            (WeightsAsATile(4, 3), 40, 0, "clip"),
            (WeightsAsATile(3, 4), 56, 1, "clip"),
        ]
    ),
)
def test_products_are_as_wide_as_the_tile(tile, k, residual, activation, tmp_path):
    shape = replace(STAGE, k=k)
    made = make_constants(tile, shape, PostOps((activation, 0.0, np.inf), residual), False)
    text = sass(compile_cubin(emit_source(made)), tmp_path)
    assert text.count("HGMMA") == 36, "nine taps of four products"
    assert f"HGMMA.64x{tile.bn(shape)}x16" in text
    assert "UTMALDG.4D" in text, "inputs are loaded by bulk copies"
    assert ("UTMASTG.4D" in text) == (k == 64), "lines of 64 channels are stored by bulk copies"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are warp-uniform: no loops over lanes"

"""Stems computed row by row: packed filters times overlapping windows equal the convolution, and the machine code has the intended instructions."""

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, sample_layer

from whet.backends.cuda.compile import compile_cubin
from whet.network import static_shape
from whet.ops import OPS, run_layer
from whet.tactics import TACTICS
from whet.tactics._fused import get_root_layer
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.stem import stem_rows as rows

TACTIC = TACTICS["cuda/stem_rows"]


def is_accepted(i):
    layer, _ = sample_layer("Fused", i)
    if TACTIC.why_not(layer):
        return False
    return any(not TACTIC.refuses(layer, s, HOPPER) for s in TACTIC.signatures(layer, HOPPER))


SAMPLES = [i for i in range(len(OPS["Fused"].samples)) if is_accepted(i)]


def test_there_are_samples_of_every_filter():
    shapes = {static_shape(rows.make_body_convolution(sample_layer("Fused", i)[0]).inputs[1].shape)[2:] for i in SAMPLES}
    assert shapes >= {(3, 3), (5, 5), (7, 7)}


def ring_of(image, s, columns, first_column):
    """Rows of the image in the kernel's layout, [row, slot * 4], with rows of ones and padding; and the start of the first window."""
    lead, left = rows.count_leading_columns(s), -(-rows.count_leading_columns(s) // 4) * 4
    slots, x0 = rows.count_quads(s, columns) * 4, 2 * first_column - left
    out = np.zeros((s.h + 2 * s.r, slots, 4), np.float32)
    out[..., 3] = 1
    for slot in range(slots):
        if 0 <= x0 + slot < s.w:
            out[s.r : s.r + s.h, slot, : s.c] = image[:, :, x0 + slot].T
    return out.reshape(len(out), -1), (left - lead) * 4


@pytest.mark.parametrize("i", SAMPLES)
def test_windows_times_fragments_equal_the_convolution(i):
    layer, arrays = sample_layer("Fused", i)
    conv = rows.make_body_convolution(layer)
    s = rows.get_conv_shape(conv)
    signature = TACTIC.signatures(layer, HOPPER)[0]
    config = TACTIC.configs(layer, signature, HOPPER)[-1]
    kernel = TACTIC.plan(layer, signature, config, HOPPER)
    numbers = kernel.packed[0].make().view(np.float16).astype(np.float32)
    # a lane's registers of m64k16: rows g and g + 8 (here two channels), two elements of K at 2q, two more at 8 + 2q
    fragments = numbers.reshape(-1, 4, 8, 4, 2, 2, 2)
    filters = np.zeros((64, len(fragments) * 16), np.float32)
    for step, w, g, q, half, which, e in np.ndindex(fragments.shape):
        filters[w * 16 + g * 2 + which, step * 16 + half * 8 + q * 2 + e] = fragments[step, w, g, q, half, which, e]
    columns = rows.Columns.of(static_shape(layer.outputs[0].shape)[3], dict(config)["wide"])
    want = np.asarray(run_layer(get_root_layer(conv), arrays)[0])
    for tile in range(columns.tiles):
        first = 2 * tile * columns.wide - 8 * columns.skip
        ring, at = ring_of(arrays[0][0], s, columns, first)
        for y in (0, s.p // 2, s.p - 1):
            lines = ring[s.r + 2 * y - s.pad[0] : s.r + 2 * y - s.pad[0] + s.r]
            windows = np.stack([lines[:, at + 8 * n : at + 8 * n + 16 * rows.count_halves(s)].reshape(-1) for n in range(columns.bn)])
            got = filters @ windows.T
            for n in range(columns.bn):
                if 0 <= first + n < s.q:
                    assert np.allclose(got[: s.k, n], want[0, :, y, first + n], rtol=2e-3, atol=2e-2)
            assert not got[s.k :].any()


@pytest.mark.parametrize(
    "constants",
    [
        {"C": 3, "R": 7, "HALVES": 2, "LEAD": 4, "PAD_H": 3, "BN": 112, "SKIP": 0, "FROM": 1, "BLOCKS": 3, "BF16": 0},
        {"C": 3, "R": 7, "HALVES": 2, "LEAD": 4, "PAD_H": 3, "BN": 112, "SKIP": 0, "FROM": 0, "BLOCKS": 3, "BF16": 1},
        {"C": 3, "R": 7, "HALVES": 2, "LEAD": 4, "PAD_H": 3, "BN": 64, "SKIP": 1, "FROM": 1, "BLOCKS": 4, "BF16": 0},
        {"C": 1, "R": 3, "HALVES": 1, "LEAD": 2, "PAD_H": 1, "BN": 40, "SKIP": 0, "FROM": 0, "BLOCKS": 2, "BF16": 0},
    ],
)
def test_weights_stay_in_registers(constants, tmp_path):
    text = sass(compile_cubin(emit_kernel_source("stem_rows.cu", constants)), tmp_path)
    assert text.count("HGMMA") == 3 * constants["R"] * constants["HALVES"], "three rows of results, every product once"
    assert text.count("WARPGROUP.DEPBAR") == 3, "products of a row follow each other without waiting"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "STS.128" in text, "pixels are stored to shared memory in pairs"

"""Layers with 2:4 weights on CUDA (sparse.cu): machine code, tiles and reasons on any machine; on Hopper every tile against the reference."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference, sample_layer
from test_tactics import layer_of as layer_of_sample

from whet.backends.cuda.compile import compile_cubin
from whet.builder.verify.differences import compute_float8_error
from whet.composites._two_four_samples import (
    SAMPLES,
    draw_two_four_weights,
    make_sparse_conv_sample,
    make_sparse_matmul_sample,
    make_sparse_qconv_sample,
    make_sparse_qgemm_sample,
)
from whet.network import F8E4M3
from whet.ops import OPS
from whet.ops._base import Sample
from whet.tactics import PlanRefused, get_tactic, list_tactics
from whet.tactics.cuda.conv._conv import NONE, ConvShape, PostOps
from whet.tactics.cuda.sparse._kernel_text import emit_sparse_source
from whet.tactics.cuda.sparse._launch import Types, count_padded_rows, make_sparse_constants, pack_sparse
from whet.tactics.cuda.sparse._tile import SHARED_LIMIT, SparseTile, list_sparse_tiles

TACTICS = [t for t in list_tactics("cuda") if "/sparse_" in t.name and "mma" not in t.name]  # those before Hopper: test_sparse_mma.py
PAD = {"pads": (1, 1, 1, 1)}
# : several tiles along channels and pixels, K steps that wrap every ring twice, all epilogues
LARGE = {
    "3x3": make_sparse_conv_sample("f32[8,256,14,14]", 512, 3, added="before", **PAD),
    "3x3 strided": make_sparse_conv_sample("f32[8,128,29,27]", 264, 3, strides=(2, 2), activation="HardSigmoid", **PAD),
    "1x1": make_sparse_conv_sample("f32[8,1024,14,14]", 520, 1, added="behind"),
    "1x1 strided": make_sparse_conv_sample("f32[8,256,28,28]", 256, 1, strides=(2, 2)),
    "matmul": make_sparse_matmul_sample("f32[6,333,768]", 1032, "Gelu"),
    "3x3 i8": make_sparse_qconv_sample("u8[8,256,14,14]", 0, 512, 3, (0.03, 0, "u8"), ("full i8[8,512,14,14]", 0.02, 5, 1), **PAD),
    "1x1 i8": make_sparse_qconv_sample("i8[8,1024,14,14]", 7, 528, 1, (0.03, -20, "i8")),
    "1x1 i8 to floats": make_sparse_qconv_sample("u8[8,512,14,14]", 100, 264, 1, None, "f32[8,264,14,14]"),
    "3x3 e4m3": make_sparse_qconv_sample("f8e4m3[8,256,14,14]", None, 272, 3, (0.2, None, "f8e4m3"), ("f8e4m3[8,272,14,14]", 0.7, None, 1), **PAD),
    "gemm i8": make_sparse_qgemm_sample("i8[2000,1040]", -3, 528, (0.03, 4, "i8")),
}
TEXTS = [
    (SparseTile(2, 2, 192, 4, 2), Types("f16", "f16"), False, PostOps(NONE)),
    (SparseTile(2, 1, 256, 3, 2), Types("bf16", "bf16"), True, PostOps(NONE, 1)),
    (SparseTile(2, 1, 128, 3, 2, 2), Types("f16", "f16"), True, PostOps(("silu", 0.0, 0.0), 2)),
    (SparseTile(1, 1, 32, 6), Types("f16", "f16"), False, PostOps(("gelu", 0.0, 0.0))),
    (SparseTile(2, 2, 192, 3, 2), Types("u8", "u8", "u8", True), True, PostOps(NONE, 1)),
    (SparseTile(2, 1, 128, 6), Types("i8", "i8", "", True), False, PostOps(("silu", 0.0, 0.0))),
    (SparseTile(2, 1, 256, 4, 2), Types("f8e4m3", "f8e4m3", "", True), False, PostOps(NONE)),
    (SparseTile(4, 1, 128, 4), Types("i8", "f16"), True, PostOps(NONE)),
]


@pytest.mark.parametrize(("tile", "types", "im2col", "post_ops"), TEXTS, ids=str)
def test_sparse_kernels_use_hopper_instructions(tile, types, im2col, post_ops, tmp_path):
    assert tile.why_invalid(types.in_size, types.out_size, post_ops.residual > 0) is None
    text = sass(compile_cubin(emit_sparse_source(make_sparse_constants(tile, types, im2col, post_ops))), tmp_path)
    product = {"f16": "HGMMA.SP", "bf16": "HGMMA.SP", "f8e4m3": "QGMMA.SP"}.get(types.source, "IGMMA.SP")
    found = [line for line in text.splitlines() if "GMMA." in line]
    assert len(found) == 4 * tile.mi, "two instructions per 64 rows, in two copies of the loop's body"
    assert all(product in line for line in found)
    assert ("UTMALDG.4D.IM2COL" if im2col else "UTMALDG.2D") in text, "inputs are loaded by bulk copies"
    assert (".MULTICAST" in text) == (tile.cluster > 1)
    assert "UTMASTG" in text
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text, "addresses of copies and products are warp-uniform: no loops over lanes"
    loop = text[text.index(product) : text.rindex(product)]
    assert "MEMBAR" not in loop, "slots are released without a fence"
    assert "R2UR" not in loop, "descriptors stay in uniform registers"


@pytest.mark.parametrize(("tile", "types", "im2col", "post_ops"), TEXTS[:1] + TEXTS[4:6], ids=str)
def test_metadata_of_a_step_outlives_its_products(tile, types, im2col, post_ops, tmp_path):
    """A product reads its metadata register at execution, after later instructions were issued: the next step must use other registers."""
    text = sass(compile_cubin(emit_sparse_source(make_sparse_constants(tile, types, im2col, post_ops))), tmp_path)
    products = [line.split(";")[0] for line in text.splitlines() if "GMMA.SP" in line]
    registers = [re.findall(r" (R\d+)\b", line)[-1] for line in products]
    assert len(registers) == 4 * tile.mi
    assert not set(registers[: 2 * tile.mi]) & set(registers[2 * tile.mi :])


@pytest.mark.parametrize("in_size", [1, 2])
@pytest.mark.parametrize("out_size", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("m", "k"), [(8192, 8192), (6272, 256), (49, 8), (200, 1000)])
def test_every_shape_has_tiles_that_fit(m, k, in_size, out_size, residual):
    if in_size == 2 and out_size == 1:
        pytest.skip("no kernel has 16-bit inputs and 8-bit results")
    found = list_sparse_tiles(m, k, 36, in_size, out_size, residual, 132)
    assert found
    assert len(set(found)) == len(found)
    for tile in found:
        assert tile.blocks * (tile.shared(in_size, out_size, residual) + 1024) <= SHARED_LIMIT + 1024
        own, loader = tile.moved_registers
        if own:
            equal = 512 // (tile.wgs + 1) // 8 * 8
            assert tile.wgs * own + loader <= equal * (tile.wgs + 1), "a block can only move registers that it has"
            assert loader >= 24


def test_packed_operands_have_rows_of_all_tiles():
    weights = draw_two_four_weights(72, 40, 3, 3).astype(np.float16)
    tile = SparseTile(2, 2, 128, 4, 2)
    values, metadata = pack_sparse(weights, tile, 2, False)
    assert values.shape == (72, 9 * 32), "forty channels of a tap fill one K step of 64, two values of every four"
    assert metadata.shape == (9, count_padded_rows(tile, 72) // 64, 128, 1)
    paired, _ = pack_sparse(weights.astype(np.int8), tile, 1, True)
    assert paired.shape == (80, 9 * 64), "rows are paired in sixteens"


def changed(sample, edit):
    """The layer of a sample with edited weights."""
    inputs = [a.copy() if isinstance(a, np.ndarray) and a.ndim > 1 else a for a in sample.inputs]
    edit(next(a for a in inputs if isinstance(a, np.ndarray) and a.ndim > 1))
    _, layer, _ = layer_of_sample("Fused", Sample(inputs, sample.attrs, sample.regions))
    return layer


def set_at(where, value):
    def edit(w):
        w[where] = value

    return edit


@pytest.mark.parametrize(
    ("tactic", "sample", "edit", "reason"),
    [
        (
            "cuda/sparse_conv",
            0,
            set_at((3, slice(8, 11), 1, 2), 1),
            r"weights are not 2:4: output channel 3, inputs 8-11 of filter tap \(1, 2\) have 3 non-zeros",
        ),
        ("cuda/sparse_conv", 1, set_at((7, slice(132, 136)), 1), "weights are not 2:4: output channel 7, inputs 132-135 have 4 non-zeros"),
        ("cuda/sparse_conv", 1, set_at((7, 5), np.nan), "weights hold a NaN: output channel 7, inputs 4-7"),
        ("cuda/sparse_gemm", 3, set_at((slice(0, 3), 9), 1), "weights are not 2:4: output channel 9, inputs 0-3 have 3 non-zeros"),
        ("cuda/sparse_qconv", 4, set_at((1, slice(0, 4), 0, 0), 3), r"output channel 1, inputs 0-3 of filter tap \(0, 0\) have 4 non-zeros"),
        ("cuda/sparse_qgemm", 8, set_at((143, slice(204, 208)), 3), "output channel 143, inputs 204-207 have 4 non-zeros"),
    ],
)
def test_weights_that_are_not_two_four_are_refused(tactic, sample, edit, reason):
    t = get_tactic(tactic)
    assert t.why_not(changed(SAMPLES[sample], lambda w: None)) is None
    assert re.search(reason, t.why_not(changed(SAMPLES[sample], edit)))


def test_channels_without_groups_of_four_are_refused():
    layer, _ = sample_layer("Conv", 1)
    assert get_tactic("cuda/sparse_conv").why_not(layer) is not None
    _, layer, _ = layer_of_sample("Conv", Sample(["f32[1,6,5,5]", "const f32[8,6,3,3]"], {}))
    assert "6 input channels have no whole groups of four" in get_tactic("cuda/sparse_conv").why_not(layer)


def test_a_tile_that_does_not_fit_is_refused():
    _, layer, _ = layer_of_sample("Fused", SAMPLES[0])
    t = get_tactic("cuda/sparse_conv")
    signature = t.signatures(layer, HOPPER)[0]
    with pytest.raises(PlanRefused, match="bytes of shared memory"):
        t.plan(layer, signature, SparseTile(2, 2, 192, 9).config, HOPPER)
    with pytest.raises(PlanRefused, match="no tile of the sparse kernels"):
        t.plan(layer, signature, (("rows", 3),), HOPPER)


def test_sparse_shapes_without_padding_are_plain():
    assert ConvShape(8, 14, 14, 1024, 520).plain
    assert not ConvShape(8, 28, 28, 256, 256, stride=(2, 2)).plain


def planned(layer, backend):
    """(tactic, signature, config, kernel) of all tiles that the sparse tactics offer."""
    for t in TACTICS:
        if t.why_not(layer):
            continue
        for signature in t.signatures(layer, backend):
            assert t.refuses(layer, signature, backend) is None
            for config in t.configs(layer, signature, backend):
                yield t, signature, config, t.plan(layer, signature, config, backend)


CASES = {**LARGE, **{f"sample {i}": s for i, s in enumerate(SAMPLES)}}


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_planned(name):
    _, layer, _ = layer_of_sample("Fused", CASES[name])
    found = list(planned(layer, HOPPER))
    assert len(found) >= 6, "several tiles"
    for _, _, _, kernel in found[:: max(1, len(found) // 2)]:
        for p in kernel.packed:
            data = p.make()
            assert (data.nbytes, data.dtype) == (p.nbytes, np.uint8)


def test_samples_are_in_the_contract_tests():
    assert {id(s) for s in SAMPLES} <= {id(s) for s in OPS["Fused"].samples}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_tile_matches_the_reference(gpu, name):
    _, layer, arrays = layer_of_sample("Fused", CASES[name])
    for t, signature, config, kernel in planned(layer, gpu):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
            if o.dtype == F8E4M3:
                error, why = compute_float8_error(g, w)
                assert error <= kernel.rtol, f"{t.name} {signature} {config}: {why or error} of {kernel.rtol}"
            elif w.dtype.kind != "f":
                assert np.abs(g.astype(np.int64) - w.astype(np.int64)).max(initial=0) <= 1, f"{t.name} {signature} {config}"
            else:
                judge(g, w, max(kernel.rtol, 0.0), o.dtype, f"{t.name} {signature} {config}")

"""2:4 weights with mma.sp (sparse_mma.cu): machine code for GPUs before Hopper, plans, splits of K, refusals; on a GPU the results of all tiles."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference
from test_tactics import layer_of as layer_of_sample

from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import DEVICES, CompileOnlyGpu
from whet.composites._two_four_samples import make_sparse_conv_sample, make_sparse_matmul_sample
from whet.network.types import BF16
from whet.tactics import PlanRefused, get_tactic
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import NONE, RELU, ConvShape, PostOps
from whet.tactics.cuda.sparse._mma_launch import TILES, count_partial_bytes, list_mma_tiles, make_mma_constants

AMPERE = CompileOnlyGpu("sm_80")
TACTICS = [get_tactic("cuda/sparse_mma_conv"), get_tactic("cuda/sparse_mma_gemm")]
PAD = {"pads": (1, 1, 1, 1)}
CASES = {
    "3x3": make_sparse_conv_sample("f32[3,72,9,10]", 136, 3, added="before", **PAD),
    "3x3 strided and dilated": make_sparse_conv_sample("f32[2,64,15,13]", 72, 3, strides=(2, 2), dilations=(2, 2), activation="HardSigmoid", **PAD),
    "1x1": make_sparse_conv_sample("f32[4,200,7,7]", 264, 1, added="behind"),
    "few pixels": make_sparse_conv_sample("f32[1,256,2,2]", 64, 1),
    "matmul": make_sparse_matmul_sample("f32[3,37,768]", 328, "Gelu"),
    "one row": make_sparse_matmul_sample("f32[1,2048]", 264, "Gelu"),
}


@pytest.mark.parametrize("arch", sorted(set(DEVICES) - {"sm_90"}))
@pytest.mark.parametrize(
    ("i", "splits", "dtype", "post_ops"),
    [(0, 1, "f16", PostOps(RELU, 1)), (3, 4, "bf16", PostOps(NONE)), (4, 1, "f16", PostOps(("silu", 0.0, 0.0), 2))],
)
def test_it_compiles_to_sparse_tensor_core_instructions(arch, i, splits, dtype, post_ops, tmp_path):
    tile = replace(TILES[i], splits=splits)
    assert tile.shared <= DEVICES[arch][1]
    text = sass(compile_cubin(emit_kernel_source("sparse_mma.cu", make_mma_constants(tile, dtype, post_ops)), arch=arch), tmp_path)
    products = [line for line in text.splitlines() if "HMMA.SP" in line]
    assert len(products) >= 2 * tile.mi * tile.ni, "two instructions per tile of 16 channels and 8 pixels in a K step"
    assert all((".BF16" in line) == (dtype == "bf16") for line in products)
    assert "LDGSTS" in text, "inputs are copied without registers"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


def planned(layer):
    """(tactic, signature, kernel) of all tiles on an A100."""
    for t in TACTICS:
        if t.why_not(layer):
            continue
        for signature in t.signatures(layer, AMPERE):
            assert t.refuses(layer, signature, AMPERE) is None
            for config in t.configs(layer, signature, AMPERE):
                yield t, signature, t.plan(layer, signature, config, AMPERE)


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_planned(name):
    _, layer, _ = layer_of_sample("Fused", CASES[name])
    found = list(planned(layer))
    assert {s.outputs[0].dtype.name for _, s, _ in found} == {"f16", "bf16"}
    assert len(found) >= 6, "several tiles"
    for _, _, kernel in found[::3]:
        for p in kernel.packed:
            assert p.make().nbytes == p.nbytes


def test_other_gpus_and_weights_are_refused():
    _, layer, _ = layer_of_sample("Fused", make_sparse_conv_sample("f32[8,64,14,14]", 64, 1))
    t = TACTICS[0]
    signature = t.signatures(layer, AMPERE)[0]
    assert "Hopper" in t.refuses(layer, signature, HOPPER)
    turing = CompileOnlyGpu("sm_80", features=frozenset({"sm_75"}))
    assert "needs the sparse tensor cores" in t.refuses(layer, signature, turing)
    for config in ((("wm", 3),), (), (*TILES[0].config[:-1], ("splits", 0)), (*TILES[0].config[:-1], ("splits", 1000))):
        with pytest.raises(PlanRefused, match="no tile"):
            t.plan(layer, signature, config, AMPERE)


def test_k_is_split_where_blocks_are_few():
    few, many = ConvShape(1, 7, 7, 512, 512, 3, 3, pad=(1, 1, 1, 1)), ConvShape(32, 56, 56, 64, 256)
    for tile in (found := list_mma_tiles(few, 132, 227 * 1024)):
        blocks = -(-few.k // tile.bm) * -(-few.m // tile.bn) * tile.splits
        assert tile.splits == 1 or 66 <= blocks <= 264
        assert count_partial_bytes(tile, few) == (4 * few.m * few.k * tile.splits if tile.splits > 1 else 0)
    assert found[0].splits > 1
    assert all(t.splits == 1 for t in list_mma_tiles(many, 132, 227 * 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_tile_matches_the_reference(gpu, name):
    """`mma.sp` runs on Hopper too."""
    _, layer, arrays = layer_of_sample("Fused", CASES[name])
    for t, signature, kernel in planned(layer):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
            judge(g, w, kernel.rtol, o.dtype, f"{t.name} {signature} {kernel.implementation}")


@pytest.mark.gpu
def test_the_sum_is_exact_for_small_integers(gpu):
    """Every product of integers up to 4 is exact: one wrong position of the metadata changes the result."""
    _, layer, arrays = layer_of_sample("Fused", CASES["matmul"])
    rng = np.random.default_rng(0)
    arrays[0][:] = rng.integers(-4, 5, arrays[0].shape)
    for t, signature, kernel in planned(layer):
        if signature.outputs[0].dtype == BF16:
            continue
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], 1e-3, signature.outputs[0].dtype, f"{t.name} {kernel.implementation}")

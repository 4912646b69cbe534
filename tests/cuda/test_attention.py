"""Attention in one launch: views of its operands, tiles that fit, machine code, the pass that forms it, and on a GPU every supported shape."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from support.selection import with_long_variants
from whet import zoo
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.composites.attention import make_attention_sample
from whet.frontends.onnx import network_from_onnx
from whet.network import Network, parse_network, parse_type
from whet.ops import sample_layer
from whet.tactics._attention import Guard, View, join_leading_axes, make_plain_view, match_attention, without_period
from whet.tactics._base import PlanRefused, get_tactic
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.attention import attention_fused as fused
from whet.tactics.cuda.attention.attention import Attention, count_shared_bytes, list_tiles


def layer_of(*sizes, **how):
    return sample_layer("Fused", make_attention_sample(*sizes, **how))[1:]


def elements(array, view):
    """The elements of a row-major array that a kernel with these strides reads."""
    return array.reshape(-1)[view.offset + np.tensordot(np.indices(view.shape), view.strides, (0, 0))]


@pytest.mark.parametrize("layout", ["heads", "rows", "stacked"])
def test_transposes_and_parts_become_strides(layout):
    layer, arrays = layer_of(2, 3, 24, 24, 32, layout=layout, mask=(2, 1, 1, 24))
    found = match_attention(layer)
    assert (found.batch, found.heads, found.rows, found.keys, found.size) == (2, 3, 24, 24, 32)
    assert found.turned == (layout == "heads")
    q, k, v, mask = (elements(arrays[view.place], view) for view in (found.q, found.k, found.v, found.mask))
    scores = (q @ k * found.scale + mask).astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    got = np.empty(y.size)
    got[elements(np.arange(y.size), found.out)] = y
    np.testing.assert_allclose(got, reference(layer, arrays)[0].reshape(-1), rtol=1e-4, atol=1e-5)


def test_views():
    view = make_plain_view(3, (4, 5, 6))
    assert view == View(3, (4, 5, 6), (30, 6, 1))
    assert view.transpose((2, 0, 1)) == View(3, (6, 4, 5), (1, 30, 6))
    assert view.take(1, -1) == View(3, (4, 6), (30, 1), 24)


@pytest.mark.parametrize(
    ("sizes", "how", "why"),
    [
        ((1, 2, 16, 16, 257), {}, "heads of 257 and 257"),
        ((1, 2, 16, 16, 64), {"value_size": 264}, "heads of 64 and 264"),
        ((1, 2, 16, 16, 64), {"scale": "Mul", "factor": -0.5}, "a scale"),
    ],
)
def test_refusals_say_why(sizes, how, why):
    layer, _ = layer_of(*sizes, **how)
    assert why in Attention().why_not(layer)
    plain = sample_layer("Softmax", attention_free())[1]
    assert "Softmax" in Attention().why_not(plain)


def attention_free():
    from whet.ops import OPS

    return OPS["Softmax"].samples[0]


@pytest.mark.parametrize(
    "sizes",
    [(1, 12, 128, 128, 64), (8, 12, 128, 128, 64), (1, 12, 197, 197, 64), (64, 3, 49, 49, 32), (1, 16, 577, 577, 80), (4, 8, 2048, 2048, 128)],
)
def test_tiles_fit(sizes):
    found = match_attention(layer_of(*sizes, layout="rows")[0])
    made = list_tiles(found, 132)
    assert len(made) >= 2
    assert len(set(made)) == len(made)
    assert all(count_shared_bytes(found, c) <= 200 * 1024 for c in made)
    small = list_tiles(found, 84, False, 99 * 1024)
    assert small
    assert all(count_shared_bytes(found, c) <= 99 * 1024 for c in small)


def test_a_tile_that_an_older_gpu_cannot_hold_is_refused_there():
    layer, _ = layer_of(4, 8, 2048, 2048, 128, layout="rows")
    machines = [CompileOnlyGpu(f, multiprocessors=84) for f in ("sm_80", "sm_86", "sm_89")]
    large = (("wr", 4), ("wk", 1), ("mi", 1), ("kc", 64), ("stages", 2)), (("wr", 2), ("wk", 2), ("mi", 1), ("kc", 64), ("stages", 2))
    found, t = match_attention(layer), Attention()
    signature = t.signatures(layer, machines[0])[0]
    wide = next(c for c in large if count_shared_bytes(found, c) > 99 * 1024)
    assert t.plan(layer, signature, wide, machines[0])
    for machine in machines[1:]:
        with pytest.raises(PlanRefused, match="cannot hold"):
            t.plan(layer, signature, wide, machine)
        assert all(t.plan(layer, signature, c, machine) for c in t.configs(layer, signature, machine))


TILES = [
    {"SIZE": 64, "KC": 64, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"SIZE": 64, "KC": 64, "WR": 4, "WK": 1, "MI": 2, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"SIZE": 64, "KC": 32, "WR": 1, "WK": 4, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 1, "SAME": 1},
    {"SIZE": 64, "KC": 32, "WR": 4, "WK": 1, "MI": 2, "STAGES": 1, "TRANSPOSED": 0, "MASK": 0, "SAME": 0},
    {"SIZE": 64, "KC": 64, "WR": 1, "WK": 8, "MI": 1, "STAGES": 1, "TRANSPOSED": 1, "MASK": 0, "SAME": 0},
    {"SIZE": 128, "KC": 32, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 0},
    {"SIZE": 96, "KC": 64, "WR": 2, "WK": 2, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 1},
    {"SIZE": 80, "KC": 64, "WR": 4, "WK": 2, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"SIZE": 96, "KC": 32, "WR": 2, "WK": 2, "MI": 2, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"SIZE": 32, "KC": 64, "WR": 8, "WK": 1, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 0, "SAME": 1},
    {"SIZE": 64, "KC": 32, "WR": 1, "WK": 4, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 1, "SAME": 1, "GUARDED": 1},
    {"SIZE": 64, "KC": 64, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 0, "GUARDED": 1},
    {"SIZE": 36, "UNIT": 4, "KC": 64, "WR": 4, "WK": 1, "MI": 2, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"SIZE": 21, "UNIT": 1, "KC": 32, "WR": 2, "WK": 2, "MI": 1, "STAGES": 2, "TRANSPOSED": 1, "MASK": 0, "SAME": 0, "CAPPED": 1},
    {"SIZE": 256, "KC": 32, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 0, "CAPPED": 1},
    {"SIZE": 16, "VALUE_SIZE": 200, "KC": 32, "WR": 2, "WK": 2, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 0, "SAME": 1},
]


@pytest.mark.parametrize("tile", with_long_variants(TILES), ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_machine_code(tile, arch, tmp_path):
    if tile["MI"] == 2 and arch == "sm_80":
        return  # not offered there
    tile = {"UNIT": 8, **tile}
    unit, size = tile["UNIT"], tile["SIZE"]
    constants = {"GUARDED": 0, "CAPPED": 0, "VALUE_SIZE": size, "Q_SHARED": int(size > 128), "TYPE": 2, "BF16": 1, **tile}
    del constants["UNIT"]
    constants |= dict.fromkeys(("Q_UNIT", "K_UNIT", "V_UNIT", "OUT_UNIT"), unit)
    text = sass(compile_cubin(emit_kernel_source("attention.cu", constants), arch=arch), tmp_path)
    assert "HMMA.16816.F32.BF16" in text
    copies = {8: "LDGSTS.E.BYPASS.128", 4: "LDGSTS.E.64", 1: "STS.U16"}[unit]
    assert copies in text, "keys and values are loaded by asynchronous copies, single elements through registers"
    assert "LDSM" in text
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


@pytest.mark.parametrize(("name", "options", "layers"), [
    ("vit_b_16", {"layers": 3, "hidden": 384, "heads": 6}, 3),
    ("bert_base", {"sequence": 128, "layers": 3, "hidden": 384, "heads": 6}, 3),
    ("swin_t", {}, 1),
])  # fmt: skip
def test_attention_of_networks_becomes_one_layer_without_transposes(name, options, layers):
    net = network_from_onnx(zoo.build(name, batch=1, **options))
    low, _ = lower_network(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    found = [x for x in low.layers if x.composite == "Attention"]
    assert len(found) >= layers
    for x in found:
        made = match_attention(x)
        assert not isinstance(made, str), made
        assert Attention().why_not(x) is None
        assert not made.turned, "keys are read as rows of the projection's output"
    if name != "swin_t":
        assert sum(x.op == "Transpose" for x in low.layers) <= 1


PACKED = """
network packed source
in %x: f32[4,16,{channels}]
const %w: f32[{channels},{projected}] = seed(1)
const %shape: i64[5] = [4,16,3,4,{size}]
const %axis: i64[1] = [0]
const %rows: i64[3] = [4,16,{channels}]
const %scale: f32[] = [0.25]
%y = MatMul(%x, %w)
%r = Reshape(%y, %shape)
%t = Transpose(%r, perm=[2,0,3,1,4])
%qs, %ks, %vs = Split(%t, axis=0, split=[1,1,1])
%q = Squeeze(%qs, %axis)
%k = Squeeze(%ks, %axis)
%v = Squeeze(%vs, %axis)
%kt = Transpose(%k, perm=[0,1,3,2])
%s = MatMul(%q, %kt)
%m = Mul(%s, %scale)
%p = Softmax(%m, axis=-1)
%o = MatMul(%p, %v)
%ot = Transpose(%o, perm=[0,2,1,3])
%z = Reshape(%ot, %rows)
out %z
"""


@pytest.mark.parametrize("size", [36, 60, 48])
def test_packed_projections_of_any_head_size_are_read_in_place(size):
    net = parse_network(PACKED.format(size=size, channels=4 * size, projected=12 * size))
    low, _ = lower_network(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    assert Counter(x.composite or x.op for x in low.layers if x.op != "Reshape") == {"MatMul": 1, "Attention": 1}, "no copies beside them"
    attention = next(x for x in low.layers if x.composite == "Attention")
    assert (fused.AttentionFused().why_not(attention) is None) == (size % 8 == 0)
    signature = Attention().signatures(attention, HOPPER)[0]
    kernel = Attention().plan(attention, signature, Attention().configs(attention, signature, HOPPER)[0], HOPPER)
    assert "attention" in kernel.implementation
    heads = match_attention(attention)
    assert (heads.q.place, heads.k.place, heads.v.place) == (0, 0, 0)
    assert (heads.k.offset, heads.v.offset) == (4 * size, 8 * size)


def fused_plan(sizes, how, kind="f16"):
    """(layer, arrays, heads, signature) of the first signature in this type."""
    layer, arrays = layer_of(*sizes, **how)
    heads = match_attention(layer)
    signature = next(s for s in fused.AttentionFused().signatures(layer, HOPPER) if s.outputs[0].dtype.name == kind)
    return layer, arrays, heads, signature


def test_constants_that_hide_later_keys_are_causal():
    for value in (-np.inf, np.finfo(np.float32).min, -65504.0):
        layer, _ = layer_of(1, 2, 40, 70, 64, layout="rows", causal=value)
        assert match_attention(layer).causal == 30, "the last row sees all keys"
    layer, _ = layer_of(1, 2, 40, 70, 64, layout="rows", causal=-5.0)
    assert match_attention(layer).causal is None, "keys that are only less likely are not hidden"
    layer, _ = layer_of(1, 2, 40, 70, 64, layout="rows", mask=(1, 1, 40, 70), constant=True)
    assert match_attention(layer).causal is None
    layer, _ = layer_of(1, 2, 70, 40, 64, layout="rows", causal=-np.inf)
    assert match_attention(layer).causal is None, "the first rows would see no key"


def test_heads_that_share_keys():
    layer, arrays = layer_of(2, 6, 20, 24, 32, layout="rows", group=3, scale="Mul")
    found = match_attention(layer)
    assert (found.k.group, found.k.heads, found.v.heads, found.q.heads) == (3, 2, 2, 6)
    k = arrays[1].reshape(-1)
    for batch, head in ((0, 0), (0, 2), (1, 3), (1, 5)):
        step = found.k.steps()
        rows = found.k.offset + batch * step[0] + head // 3 * step[1] + np.arange(24)[:, None] * found.k.swap_last_axes().strides[-2] + np.arange(32)
        np.testing.assert_array_equal(k[rows], arrays[1][batch, :, head // 3])


@pytest.mark.parametrize(
    ("sizes", "how", "why"),
    [
        ((1, 2, 300, 304, 64), {"layout": "heads"}, "columns"),
        ((1, 2, 300, 304, 36), {"layout": "rows"}, "heads of 36"),
        ((1, 2, 300, 304, 264), {"layout": "rows"}, "heads of 264"),
        ((1, 2, 300, 304, 72), {"layout": "rows"}, None),
        ((1, 2, 300, 304, 256), {"layout": "rows", "cap": 50.0}, None),
        ((1, 2, 300, 304, 32), {"layout": "rows", "value_size": 128}, None),
        ((1, 2, 300, 301, 64), {"layout": "rows"}, None),
        ((1, 6, 300, 301, 80), {"layout": "rows", "mask": (1, 1, 300, 301), "group": 2}, None),
    ],
)
def test_fused_attention_accepts_and_refuses(sizes, how, why):
    layer, _ = layer_of(*sizes, **how)
    said = fused.AttentionFused().why_not(layer)
    assert said is None if why is None else why in said


@pytest.mark.parametrize(("size", "how"), [(40, {}), (32, {"value_size": 64}), (64, {"cap": 2.0}), (256, {})])
def test_heads_of_any_multiple_of_8_are_taken_by_wgmma_only(size, how):
    layer, _, _, signature = fused_plan((1, 2, 64, 64, size), {"layout": "rows", **how})
    assert fused.AttentionFused().refuses(layer, signature, HOPPER) is None
    assert "attention_fused" in Attention().refuses(layer, signature, HOPPER)


def test_fused_attention_needs_hopper_and_mma_sync_computes_the_rest():
    layer, _, _, signature = fused_plan((1, 2, 64, 64, 64), {"layout": "rows"})
    assert "Hopper" in fused.AttentionFused().refuses(layer, signature, CompileOnlyGpu("sm_80"))
    assert "attention_fused" in Attention().refuses(layer, signature, HOPPER)
    columns, _ = layer_of(1, 2, 64, 64, 64, layout="heads")
    assert Attention().refuses(columns, signature, HOPPER) is None


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ({"mask": (2, 1, 1, 96)}, fused.MaskForm(fused.KEYS, 1, 192)),
        ({"mask": (2, 3, 50, 96)}, fused.MaskForm(fused.ROWS, 1, 0, 2)),
        ({"mask": (96,)}, fused.MaskForm(fused.KEYS, 1, 192)),
        ({"mask": (1, 3, 50, 96), "constant": True}, fused.MaskForm(fused.TILES, 1)),
        ({"causal": -np.inf}, fused.MaskForm()),
        ({}, fused.MaskForm()),
    ],
    ids=str,
)
def test_how_masks_are_read(how, form):
    layer, _, heads, signature = fused_plan((2, 3, 50, 96, 64), {"layout": "rows", **how})
    assert fused.mask_form(heads, layer, signature) == form


@pytest.mark.parametrize("shape", [(1, 3, 70, 90), (2, 1, 1, 90), (2, 3, 70, 1)], ids=str)
def test_constant_masks_are_packed_in_the_order_of_the_accumulators(shape):
    layer, arrays, heads, signature = fused_plan((2, 3, 70, 90, 32), {"layout": "rows", "mask": shape, "constant": True})
    tile = fused.Tile(48, 1)
    kernel = fused.AttentionFused().plan(layer, signature, tile.config, HOPPER)
    packed = kernel.packed[0].make().view(np.float16).astype(np.float32).reshape(-1, 4, 48 // 16, 32, 8)
    per_batch, per_head, per_row_tile, _ = fused.count_tile_steps(heads, heads.mask, tile)
    mask = np.broadcast_to(arrays[-1].astype(np.float16), (2, 3, 70, 90))
    for batch, head, row, key in ((0, 0, 0, 0), (1, 2, 69, 89), (0, 1, 33, 50), (1, 0, 8, 47), (1, 1, 17, 64)):
        values = packed[batch * per_batch + head * per_head + row // 64 * per_row_tile + key // 48, row % 64 // 16]
        column, lane = key % 48, row % 8 * 4 + key % 8 // 2
        accumulator = column // 8 * 4 + row % 16 // 8 * 2 + key % 2
        assert values[accumulator // 8, lane, accumulator % 8] == mask[batch, head, row, key]
    assert (packed[1, :, 2].reshape(4, 8, 4, 8)[:, :, 1:, 4:] == -np.inf).all(), "keys past the end"


FUSED_TILES = [
    (64, fused.Tile(128, 1, stages=1, blocks=3), fused.MaskForm(fused.KEYS, 1, 256), None),
    (64, fused.Tile(128, 2, overlap=1, pingpong=1), fused.MaskForm(), 0),
    (64, fused.Tile(96, 4, stages=3), fused.MaskForm(), None),
    (64, fused.Tile(96, 2, 2, stages=4, overlap=1), fused.MaskForm(fused.KEYS, 0, 1536), None),
    (64, fused.Tile(64, 4, stages=8, overlap=1, turns=2), fused.MaskForm(), None),
    (64, fused.Tile(128, 2, 2, 2, stages=4), fused.MaskForm(fused.TILES, 1), None),
    (64, fused.Tile(64, 2, overlap=1), fused.MaskForm(fused.ROWS, 0, 0, 1), None),
    (32, fused.Tile(64, 1, stages=1, blocks=4), fused.MaskForm(fused.TILES, 1), None),
    (80, fused.Tile(128, 2, overlap=1), fused.MaskForm(), None),
    (96, fused.Tile(128, 2, overlap=1, pingpong=1), fused.MaskForm(), None),
    (128, fused.Tile(128, 2, overlap=1, pingpong=1), fused.MaskForm(), 0),
    (128, fused.Tile(64, 1, cluster=2), fused.MaskForm(fused.KEYS, 2, 256), None),
    (72, fused.Tile(128, 2, overlap=1), fused.MaskForm(), 0),
    (256, fused.Tile(64, 1), fused.MaskForm(), None),
]


@pytest.mark.parametrize("guard", [Guard.NONE, Guard.HIDDEN])
@pytest.mark.parametrize(("size", "tile", "mask", "causal"), with_long_variants(FUSED_TILES), ids=str)
def test_machine_code_of_fused_attention(size, tile, mask, causal, guard, tmp_path):
    _, _, heads, _ = fused_plan((1, 2, 512, 512, size), {"layout": "rows"})
    heads = replace(heads, causal=causal, guard=guard)
    assert fused.tile_unfit(heads, mask, tile) is None
    constants = fused.make_constants(heads, mask, tile, True)
    text = sass(compile_cubin(emit_kernel_source("attention_fused.cu", constants)), tmp_path)
    products, copies = re.findall(r"HGMMA\S+", text), 2 if tile.overlap else 1
    assert len(products) == copies * (-(-size // 16) + tile.bn // 16), "both products, unrolled"
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 2 * copies, "the compiler adds no waits of its own"
    assert "UTMALDG.4D" in text
    assert ("UBLKCP" in text) == (mask.kind == fused.KEYS), "a row of keys is loaded by one bulk copy"
    assert ("BAR.ARV" in text) == bool(tile.pingpong)
    assert ("UCGABAR" in text) == (tile.cluster > 1)
    assert ("USETMAXREG" in text) == bool(constants["TAKE"])
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((1, 12, 128, 128, 64), {"mask": (1, 1, 1, 128)}),
        ((32, 12, 197, 197, 64), {}),
        ((64, 3, 49, 49, 32), {"mask": (1, 3, 49, 49), "constant": True}),
        ((8, 32, 512, 512, 128), {"causal": -np.inf}),
        ((1, 1, 1, 17, 16), {}),
        ((4, 16, 2048, 2048, 96), {}),
    ],
    ids=str,
)
def test_tiles_of_fused_attention_fit(sizes, how):
    layer, _, heads, signature = fused_plan(sizes, {"layout": "rows", **how})
    tactic = fused.AttentionFused()
    tiles = fused.list_tiles(heads, fused.mask_form(heads, layer, signature), 132)
    assert 1 <= len(tiles) <= 16
    assert len(set(tiles)) == len(tiles)
    for tile in tiles:
        assert fused.tile_of(tile.config) == tile
        assert tactic.plan(layer, signature, tile.config, HOPPER)
    for wrong in ((("bn", 100),), (("bn", 64), ("wgs", 9)), (("bn", 64), ("wgs", 2), ("cluster", 3)), ()):
        with pytest.raises(PlanRefused):
            tactic.plan(layer, signature, wrong, HOPPER)


# On a GPU

SIZES = [
    ((1, 12, 128, 128, 64), {"layout": "rows", "mask": (1, 1, 1, 128)}),
    ((2, 4, 197, 197, 64), {"layout": "stacked"}),
    ((5, 3, 49, 49, 32), {"layout": "stacked", "mask": (1, 3, 49, 49), "constant": True}),
    ((1, 2, 300, 301, 80), {"layout": "rows"}),
    ((1, 2, 65, 520, 96), {"mask": (1, 1, 65, 520)}),
    ((1, 2, 257, 1000, 128), {"layout": "rows", "mask": (1, 2, 1, 1000)}),
    ((1, 1, 1, 77, 16), {"layout": "rows", "scale": ""}),
    ((2, 8, 700, 700, 64), {"layout": "rows"}),
    ((1, 9, 600, 600, 96), {"layout": "stacked"}),
    ((1, 3, 200, 1030, 128), {"layout": "rows"}),
    ((2, 2, 513, 65, 128), {"layout": "rows", "scale": "Mul"}),
    ((3, 2, 129, 384, 64), {"layout": "rows"}),
    ((2, 3, 197, 197, 128), {"layout": "stacked"}),
]


def kernels_of(layer, backend, names=("cuda/attention", "cuda/attention_fused"), most=None):
    """(tactic, signature, configuration, kernel); for mma.sync kernels also those of older GPUs."""
    for t in map(get_tactic, names):
        for signature in () if t.why_not(layer) else t.signatures(layer, backend):
            for config in first_configs(t, layer, signature, backend, most):
                yield t, signature, config, t.plan(layer, signature, config, backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "how"), SIZES, ids=str)
def test_every_tile_matches_the_reference(gpu, sizes, how):
    layer, arrays = layer_of(*sizes, **how)
    ran: Counter[str] = Counter()
    for t, signature, config, kernel in kernels_of(layer, gpu, most=14):
        got, fed = compute(gpu, layer, arrays, signature, kernel)
        judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
        ran[t.name] += 1
    assert ran["cuda/attention"] >= 4
    assert (ran["cuda/attention_fused"] >= 2) == (how.get("layout", "heads") != "heads")


ODD_SIZES = [  # rows of any number of elements, values of another number, soft caps
    ((4, 4, 256, 256, 36), {"layout": "stacked"}),
    ((4, 4, 256, 256, 60), {"layout": "stacked"}),
    ((2, 3, 50, 70, 20), {"layout": "rows", "mask": (2, 1, 1, 70)}),
    ((1, 3, 33, 45, 21), {"layout": "rows"}),
    ((1, 3, 33, 45, 10), {"mask": (1, 3, 33, 45)}),
    ((2, 4, 100, 77, 40), {"layout": "rows"}),
    ((1, 4, 100, 100, 72), {"layout": "stacked", "mask": (1, 4, 100, 100), "constant": True}),
    ((1, 4, 64, 64, 8), {"layout": "rows"}),
    ((1, 4, 196, 196, 16), {"layout": "rows", "value_size": 32, "mask": (1, 4, 196, 196), "constant": True}),
    ((1, 8, 49, 49, 32), {"layout": "rows", "value_size": 128}),
    ((1, 2, 49, 49, 20), {"layout": "rows", "value_size": 54}),
    ((1, 2, 49, 65, 64), {"value_size": 200}),
    ((1, 8, 130, 130, 256), {"layout": "rows", "causal": -np.inf, "group": 2, "cap": 5.0}),
    ((1, 4, 60, 90, 256), {"mask": (1, 1, 60, 90)}),
    ((1, 6, 70, 300, 250), {"layout": "rows", "group": 3}),
    ((2, 4, 200, 300, 64), {"layout": "rows", "mask": (2, 1, 1, 300), "cap": 2.0}),
    ((2, 4, 40, 90, 128), {"layout": "rows", "causal": float(np.finfo(np.float32).min), "group": 2, "cap": 1.0}),
    ((2, 4, 40, 90, 36), {"layout": "rows", "mask": (2, 4, 40, 90), "cap": -1.0}),
    ((6, 2, 16, 16, 36), {"layout": "stacked", "mask": (3, 2, 16, 16), "constant": True, "repeats": 2}),
    ((2, 2, 20, 32, 36), {"layout": "rows", "guard": "nan"}),
    ((2, 2, 20, 32, 36), {"layout": "rows", "guard": "hidden"}),
    ((2, 8, 1, 77, 40), {"layout": "rows"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "how"), ODD_SIZES, ids=str)
def test_heads_of_any_size_match_the_reference(gpu, sizes, how):
    layer, arrays = layer_of(*sizes, **how)
    ran: Counter[str] = Counter()
    for t, signature, config, kernel in kernels_of(layer, gpu, most=8):
        with np.errstate(all="ignore"):
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            want = reference(layer, fed)[0]
        judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
        ran[t.name] += 1
    assert ran["cuda/attention"] >= 2
    whole = sizes[-1] % 8 == 0 == how.get("value_size", 0) % 8 and how.get("layout", "heads") != "heads" and "repeats" not in how
    assert (ran["cuda/attention_fused"] >= 2) == whole


FUSED_SIZES = [
    ((2, 3, 130, 130, 64), {"layout": "rows", "causal": -np.inf}),
    ((1, 6, 100, 190, 128), {"layout": "rows", "causal": float(np.finfo(np.float32).min), "group": 3}),
    ((40, 6, 128, 128, 64), {"layout": "rows", "mask": (40, 1, 1, 128)}),
    ((3, 60, 70, 300, 32), {"layout": "rows", "mask": (1, 60, 70, 300), "constant": True}),
    ((2, 4, 33, 200, 96), {"layout": "rows", "mask": (2, 1, 33, 200), "group": 2}),
    ((1, 200, 197, 197, 64), {"layout": "stacked"}),
    ((2, 80, 130, 300, 48), {"layout": "rows", "mask": (300,)}),
    ((1, 180, 65, 600, 112), {"layout": "rows", "mask": (1, 1, 65, 600), "constant": True}),
    ((96, 3, 49, 49, 32), {"layout": "stacked", "mask": (24, 3, 49, 49), "constant": True, "repeats": 4}),
    ((6, 80, 70, 128, 64), {"layout": "rows", "mask": (3, 1, 1, 128), "repeats": 2}),
    ((15, 40, 65, 90, 64), {"layout": "rows", "mask": (5, 1, 65, 90), "repeats": 3}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "how"), FUSED_SIZES, ids=str)
def test_every_tile_of_fused_attention_matches_the_reference(gpu, sizes, how):
    layer, arrays = layer_of(*sizes, **how)
    tactic = get_tactic("cuda/attention_fused")
    for signature in tactic.signatures(layer, gpu):
        want, configs = None, first_configs(tactic, layer, signature, gpu)
        assert len(configs) >= 2
        for config in configs:
            kernel = tactic.plan(layer, signature, config, gpu)
            with np.errstate(over="ignore"):  # the lowest f32 value is -infinity in 16 bits
                got, fed = compute(gpu, layer, arrays, signature, kernel)
                again, _ = compute(gpu, layer, arrays, signature, kernel)
            want = reference(layer, fed)[0] if want is None else want
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            np.testing.assert_array_equal(again[0], got[0], err_msg=f"{signature} {config} depends on timing")


@pytest.mark.gpu
def test_padding_skips_some_steps_but_never_all(gpu):
    """Batch items that see some keys, one key and none. A row of lowest values averages all values; a row of -infinity (as in 16 bits) gives NaN."""
    layer, arrays = layer_of(4, 3, 70, 512, 64, layout="rows", mask=(4, 1, 1, 512))
    arrays[-1] = np.zeros((4, 1, 1, 512), np.float32)
    for item, visible in enumerate((512, 130, 1, 0)):
        arrays[-1][item, ..., visible:] = np.finfo(np.float32).min
    tactic = get_tactic("cuda/attention_fused")
    for signature in tactic.signatures(layer, gpu):
        for config in first_configs(tactic, layer, signature, gpu):
            kernel = tactic.plan(layer, signature, config, gpu)
            with np.errstate(all="ignore"):
                got, fed = compute(gpu, layer, arrays, signature, kernel)
                want = reference(layer, fed)[0]
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")


@pytest.mark.gpu
def test_masks_that_hide_keys_and_whole_rows(gpu):
    """Hidden keys have no effect, however large their scores. A row masked by the lowest value averages all values; minus infinity gives NaN."""
    layer, arrays = layer_of(1, 2, 40, 72, 64, layout="rows", mask=(1, 1, 40, 72))
    mask = np.zeros((1, 1, 40, 72), np.float32)
    mask[..., 50:] = -1e4
    mask[0, 0, 3] = np.finfo(np.float32).min
    mask[0, 0, 7] = -np.inf
    mask[0, 0, 8, :70] = -np.inf
    arrays[-1] = mask
    for t, signature, config, kernel in kernels_of(layer, gpu, most=14):
        if signature.inputs[-1].dtype.name == "f32":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            with np.errstate(all="ignore"):
                want = reference(layer, fed)[0]
            assert np.isnan(want[:, 7]).all()
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")


def test_kernels_use_only_instructions_of_their_gpu():
    layer, _ = layer_of(1, 2, 16, 16, 64, layout="rows")
    old = CompileOnlyGpu("sm_80")
    tactic = Attention()
    for signature in tactic.signatures(layer, old):
        assert tactic.refuses(layer, signature, old) is None, "mma.sync and cp.async exist from sm_80 on"


def test_a_soft_cap_is_read_with_its_sign():
    layer, _ = layer_of(1, 2, 20, 24, 32, cap=-5.0)
    found = match_attention(layer)
    assert (found.scale * found.cap, found.cap) == (pytest.approx(32**-0.5), 5.0)
    assert Attention().why_not(layer) is None


@pytest.mark.parametrize(
    ("sizes", "how", "units"),
    [
        ((1, 2, 8, 8, 64), {"layout": "rows"}, (8, 8, 8, 8)),
        ((1, 2, 8, 8, 36), {"layout": "stacked"}, (4, 4, 4, 4)),
        ((1, 2, 8, 8, 21), {"layout": "rows"}, (1, 1, 1, 1)),
        ((1, 2, 8, 10, 64), {}, (8, 2, 8, 8)),
        ((1, 2, 8, 8, 16), {"layout": "rows", "value_size": 20}, (8, 8, 4, 4)),
    ],
    ids=str,
)
def test_accesses_divide_rows_and_the_steps_between_them(sizes, how, units):
    found = match_attention(layer_of(*sizes, **how)[0])
    assert tuple(found.unit(name) for name in ("q", "k", "v", "the output")) == units


def test_leading_axes_that_are_one_step_are_joined():
    batch, windows, rows, heads, size = 2, 3, 16, 2, 32
    stacked, step = make_plain_view(0, (batch, windows, rows, 3, heads, size)), heads * size
    out = make_plain_view(0, (batch, windows, rows, heads, size))
    for order in ((0, 1, 3, 2, 4), (0, 3, 1, 2, 4), (3, 1, 0, 2, 4)):  # Twins, NesT, and one that no exporter writes
        views = {name: stacked.take(3, i).transpose(order) for i, name in enumerate("qkv")} | {"mask": None, "out": out.transpose(order)}
        joined = join_leading_axes(views)
        assert "mask" not in joined
        assert joined["q"].shape == (batch * windows, heads, rows, size)
        assert joined["v"].strides == (3 * rows * step, size, 3 * step, 1)
        assert joined["v"].offset == 2 * step
        array = np.arange(batch * windows * rows * 3 * step)
        whole = array.reshape(batch, windows, rows, 3, heads, size)[..., 1, :, :].transpose(0, 1, 3, 2, 4)
        np.testing.assert_array_equal(elements(array, joined["k"]), whole.reshape(batch * windows, heads, rows, size))
    mask = {**views, "mask": make_plain_view(1, (1, windows, 1, 1, rows))}
    assert join_leading_axes(mask) is None, "a mask per window repeats for every batch item"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_heads_of_any_size_are_planned_on_every_gpu(arch):
    gpu = CompileOnlyGpu(arch, multiprocessors=84)
    for sizes, how in ODD_SIZES:
        layer, _ = layer_of(*sizes, **how)
        taken = [t for t in (fused.AttentionFused(), Attention()) if t.why_not(layer) is None and _accepts(t, layer, gpu)]
        assert taken, (sizes, how)
        for t in taken:
            signature = t.signatures(layer, gpu)[0]
            configs = t.configs(layer, signature, gpu)
            assert configs, (sizes, how)
            assert all(t.plan(layer, signature, c, gpu) for c in configs)


def _accepts(t, layer, gpu):
    signatures = t.signatures(layer, gpu)
    return bool(signatures) and t.refuses(layer, signatures[0], gpu) is None


def test_a_constant_mask_that_repeats_along_the_batch_stays_small():
    """Shifted windows of several images: the kernel indexes the mask of one image."""
    rng = np.random.default_rng(0)
    net = Network("windows")
    q, k, v = (net.add("Relu", net.add_input(n, parse_type("f32[600,2,49,32]"))) for n in "qkv")
    mask = net.constant(rng.choice([0.0, -100.0], (200, 2, 49, 49)).astype(np.float32))
    scores = net.add("Mul", net.add("MatMul", q, net.add("Transpose", k, perm=(0, 1, 3, 2))), net.constant(np.array(0.2, np.float32)))
    scores = net.add("Add", scores, net.add("Tile", mask, repeats=(3, 1, 1, 1)))
    net.mark_output(net.add("MatMul", net.add("Softmax", scores, axis=-1), v))
    lowered, _ = lower_network(net, BuildConfig(backend="cuda"))
    assert "Tile" not in [x.op for x in lowered.layers]
    (attention,) = [x for x in lowered.layers if x.composite == "Attention"]
    heads = match_attention(attention)
    assert (heads.batch, heads.mask.period, without_period(heads).mask.shape) == (600, 200, (200, 2, 49, 49))


@pytest.mark.parametrize("equal", [True, False])
def test_a_large_causal_mask_of_a_batch_is_folded_for_one_item(equal):
    """As the dynamo exporter writes a causal mask: a constant of bools for each item, and a Where of finfo.min."""
    net = Network("causal")
    q, k, v = (net.add("Relu", net.add_input(n, parse_type("f32[3,2,1024,32]"))) for n in "qkv")
    may = np.broadcast_to(np.tri(1024, dtype=bool), (3, 1, 1024, 1024)).copy()
    may[2, 0, 1, 0] = equal
    zero, least = (net.constant(np.array(c, np.float32)) for c in (0, np.finfo(np.float32).min))
    scores = net.add("Mul", net.add("MatMul", q, net.add("Transpose", k, perm=(0, 1, 3, 2))), net.constant(np.array(0.2, np.float32)))
    scores = net.add("Add", scores, net.add("Where", net.constant(may), zero, least))
    net.mark_output(net.add("MatMul", net.add("Softmax", scores, axis=-1), v))
    lowered, _ = lower_network(net, BuildConfig(backend="cuda"))
    assert ("Where" in [x.op for x in lowered.layers]) != equal
    (attention,) = [x for x in lowered.layers if x.composite == "Attention"]
    assert any(t.is_constant and t.shape == (1, 1, 1024, 1024) for t in attention.required_inputs()) == equal

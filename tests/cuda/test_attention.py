"""Attention in one launch: what is read of its body, how tiles fit, machine code, the pass that feeds it, and on a GPU every shape it takes."""

import re
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, planned, reference

from whet import zoo
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.composites.attention import attention_sample
from whet.frontends.onnx import network_from_onnx
from whet.ops import sample_layer
from whet.tactics._attention import View, plain_view, taken_apart
from whet.tactics._base import PlanRefused
from whet.tactics.cuda._device.source import source
from whet.tactics.cuda.attention import attention_long as long
from whet.tactics.cuda.attention.attention import Attention, candidates, shared_bytes


def layer_of(*sizes, **how):
    return sample_layer("Fused", attention_sample(*sizes, **how))[1:]


def elements(array, view):
    """What a kernel with these strides reads of a row-major array."""
    return array.reshape(-1)[view.offset + np.tensordot(np.indices(view.shape), view.strides, (0, 0))]


@pytest.mark.parametrize("lies", ["heads", "rows", "stacked"])
def test_transposes_and_parts_become_strides(lies):
    layer, arrays = layer_of(2, 3, 24, 24, 32, layout=lies, mask=(2, 1, 1, 24))
    found = taken_apart(layer)
    assert (found.batch, found.heads, found.rows, found.keys, found.size) == (2, 3, 24, 24, 32)
    assert found.turned == (lies == "heads")
    q, k, v, mask = (elements(arrays[view.place], view) for view in (found.q, found.k, found.v, found.mask))
    scores = (q @ k * found.scale + mask).astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = weights / weights.sum(-1, keepdims=True) @ v
    got = np.empty(y.size)
    got[elements(np.arange(y.size), found.out)] = y
    np.testing.assert_allclose(got, reference(layer, arrays)[0].reshape(-1), rtol=1e-4, atol=1e-5)


def test_views():
    view = plain_view(3, (4, 5, 6))
    assert view == View(3, (4, 5, 6), (30, 6, 1))
    assert view.turned((2, 0, 1)) == View(3, (6, 4, 5), (1, 30, 6))
    assert view.taken(1, -1) == View(3, (4, 6), (30, 1), 24)


@pytest.mark.parametrize(
    ("sizes", "how", "why"),
    [
        ((1, 2, 16, 16, 72), {}, "heads of 72"),
        ((1, 2, 16, 16, 256), {}, "heads of 256"),
        ((1, 2, 16, 17, 64), {}, "rows of k"),
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
    found = taken_apart(layer_of(*sizes, layout="rows")[0])
    made = candidates(found)
    assert len(made) >= 2
    assert len(set(made)) == len(made)
    assert all(shared_bytes(found, c) <= 200 * 1024 for c in made)
    small = candidates(found, 84, False, 99 * 1024)
    assert small
    assert all(shared_bytes(found, c) <= 99 * 1024 for c in small)


def test_a_tile_that_an_older_gpu_cannot_hold_is_refused_there():
    layer, _ = layer_of(4, 8, 2048, 2048, 128, layout="rows")
    machines = [CompileOnlyGpu(f, multiprocessors=84) for f in ("sm_80", "sm_86", "sm_89")]
    large = (("wr", 4), ("wk", 1), ("mi", 1), ("kc", 64), ("stages", 2)), (("wr", 2), ("wk", 2), ("mi", 1), ("kc", 64), ("stages", 2))
    found, t = taken_apart(layer), Attention()
    signature = t.signatures(layer, machines[0])[0]
    wide = next(c for c in large if shared_bytes(found, c) > 99 * 1024)
    assert t.plan(layer, signature, wide, machines[0])
    for machine in machines[1:]:
        with pytest.raises(PlanRefused, match="cannot hold"):
            t.plan(layer, signature, wide, machine)
        assert all(t.plan(layer, signature, c, machine) for c in t.configs(layer, signature, machine))


TILES = [
    {"D": 64, "KC": 64, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"D": 64, "KC": 64, "WR": 4, "WK": 1, "MI": 2, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"D": 64, "KC": 32, "WR": 1, "WK": 4, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 1, "SAME": 1},
    {"D": 64, "KC": 32, "WR": 4, "WK": 1, "MI": 2, "STAGES": 1, "TRANSPOSED": 0, "MASK": 0, "SAME": 0},
    {"D": 64, "KC": 64, "WR": 1, "WK": 8, "MI": 1, "STAGES": 1, "TRANSPOSED": 1, "MASK": 0, "SAME": 0},
    {"D": 128, "KC": 32, "WR": 4, "WK": 1, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 0},
    {"D": 96, "KC": 64, "WR": 2, "WK": 2, "MI": 1, "STAGES": 2, "TRANSPOSED": 0, "MASK": 0, "SAME": 1},
    {"D": 80, "KC": 64, "WR": 4, "WK": 2, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"D": 96, "KC": 32, "WR": 2, "WK": 2, "MI": 2, "STAGES": 2, "TRANSPOSED": 0, "MASK": -1, "SAME": 0},
    {"D": 32, "KC": 64, "WR": 8, "WK": 1, "MI": 1, "STAGES": 1, "TRANSPOSED": 0, "MASK": 0, "SAME": 1},
]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_machine_code(tile, arch, tmp_path):
    if tile["MI"] == 2 and arch == "sm_80":
        return  # not offered there
    text = sass(compile_cubin(source("attention.cu", {**tile, "TYPE": 2, "BF16": 1}), arch=arch, cached=False), tmp_path)
    assert "HMMA.16816.F32.BF16" in text
    assert "LDGSTS.E.BYPASS.128" in text, "keys and values come by asynchronous copies"
    assert "LDSM" in text
    assert not re.search(r"\b(LDL|STL)\b", text), "nothing spills"


EVEN = [(64, (112, 2, 2, 0)), (128, (80, 2, 3, 1)), (128, (112, 2, 2, 1))]  # keys that are no multiple of 64, shared out evenly


def test_keys_are_shared_out_evenly():
    layer, _ = layer_of(1, 2, 197, 197, 64, layout="rows")
    found = long.candidates(taken_apart(layer))
    assert {dict(c)["bn"] for c in found} == {112, 64}
    assert len(found) == len(set(found))
    assert {dict(c)["wgs"] for c in found} == {1, 2, 3}
    layer, _ = layer_of(1, 2, 60, 2048, 128, layout="rows")
    assert [dict(c) for c in long.candidates(taken_apart(layer))] == [{"bn": 64, "wgs": 1, "stages": 2, "turns": 0}]


@pytest.mark.parametrize(("size", "tile"), [*((size, tile) for size, tiles in long.TILES.items() for tile in tiles), *EVEN], ids=str)
def test_machine_code_of_long_sequences(size, tile, tmp_path):
    config = tuple(zip(long.NAMES, tile, strict=True))
    assert long.shared_bytes(size, config) <= long.SHARED
    keys, turns = tile[0], tile[3]
    constants = long.tile_constants(size, config)
    text = sass(compile_cubin(source("attention_long.cu", {**constants, "BF16": 1}), cached=False), tmp_path)
    products = re.findall(r"HGMMA\S+", text)
    assert len(products) == 2 * (size // 16 + keys // 16), "both products of the first step and of those that follow, unrolled"
    assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 4, "products run while the softmax is computed: the compiler waits for none by itself"
    assert "UTMALDG.4D" in text, "keys and values come by bulk copies"
    assert ("BAR.ARV" in text) == bool(turns)
    assert ("USETMAXREG" in text) == bool(constants["DEAL"])
    assert not re.search(r"\b(LDL|STL)\b", text), "nothing spills"


LONG = [
    ((1, 2, 300, 301, 64), {"lies": "rows", "mask": (1, 1, 300, 301)}, "a mask"),
    ((1, 2, 300, 304, 64), {"lies": "heads"}, "columns"),
    ((1, 2, 300, 301, 80), {"lies": "rows"}, "heads of 80"),
]


@pytest.mark.parametrize(("sizes", "how", "why"), LONG, ids=str)
def test_what_long_sequences_are_refused_for(sizes, how, why):
    layer, _ = layer_of(*sizes, **how)
    tactic = long.AttentionLong()
    signature = tactic.signatures(layer, HOPPER)[0]
    assert why in tactic.refuses(layer, signature, HOPPER)
    good, _ = layer_of(1, 2, 300, 301, 64, layout="rows")
    assert tactic.refuses(good, signature, HOPPER) is None
    assert "Hopper" in tactic.refuses(good, signature, CompileOnlyGpu("sm_80"))
    with pytest.raises(PlanRefused, match="no such tile"):
        tactic.plan(good, signature, (("bn", 100), ("wgs", 2), ("stages", 2), ("turns", 0)), HOPPER)


@pytest.mark.parametrize(("name", "options", "layers"), [("vit_b_16", {}, 12), ("bert_base", {"sequence": 128}, 12), ("swin_t", {}, 1)])
def test_networks_bring_their_attention_in_one_layer_without_transposes(name, options, layers):
    net = network_from_onnx(zoo.build(name, batch=1, **options))
    low, _ = lower_network(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    found = [x for x in low.layers if x.composite == "Attention"]
    assert len(found) >= layers
    for x in found:
        made = taken_apart(x)
        assert not isinstance(made, str), made
        assert Attention().why_not(x) is None
        assert not made.turned, "keys are read as rows, where the projection left them"
    if name != "swin_t":
        assert sum(x.op == "Transpose" for x in low.layers) <= 1


# On a GPU

SIZES = [
    ((1, 12, 128, 128, 64), {"lies": "rows", "mask": (1, 1, 1, 128)}),
    ((2, 4, 197, 197, 64), {"lies": "stacked"}),
    ((5, 3, 49, 49, 32), {"lies": "stacked", "mask": (1, 3, 49, 49), "constant": True}),
    ((1, 2, 300, 301, 80), {"lies": "rows"}),
    ((1, 2, 65, 520, 96), {"mask": (1, 1, 65, 520)}),
    ((1, 2, 257, 1000, 128), {"lies": "rows", "mask": (1, 2, 1, 1000)}),
    ((1, 1, 1, 77, 16), {"lies": "rows", "scale": ""}),
    ((2, 8, 700, 700, 64), {"lies": "rows"}),
    ((1, 9, 600, 600, 96), {"lies": "stacked"}),
    ((1, 3, 200, 1030, 128), {"lies": "rows"}),
    ((2, 2, 513, 65, 128), {"lies": "rows", "scale": "Mul"}),
    ((3, 2, 129, 384, 64), {"lies": "rows"}),
    ((2, 3, 197, 197, 128), {"lies": "stacked"}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "how"), SIZES, ids=str)
def test_every_tile_matches_the_reference(gpu, sizes, how):
    layer, arrays = layer_of(*sizes, **how)
    ran: Counter[str] = Counter()
    for t, signature, config, kernel in planned(layer, gpu, most=14):
        if t.name in ("cuda/attention", "cuda/attention_long"):
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got[0], reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{t.name} {signature} {config}")
            ran[t.name] += 1
    assert ran["cuda/attention"] >= 4
    assert (ran["cuda/attention_long"] >= 2) == ("mask" not in how and how.get("lies", "heads") != "heads" and sizes[-1] in (64, 128))


@pytest.mark.gpu
def test_masks_that_hide_keys_and_whole_rows(gpu):
    """Hidden keys count nothing, however large their scores; a row whose mask is the lowest number throughout is a mean; minus infinity gives NaN."""
    layer, arrays = layer_of(1, 2, 40, 72, 64, layout="rows", mask=(1, 1, 40, 72))
    mask = np.zeros((1, 1, 40, 72), np.float32)
    mask[..., 50:] = -1e4
    mask[0, 0, 3] = np.finfo(np.float32).min
    mask[0, 0, 7] = -np.inf
    mask[0, 0, 8, :70] = -np.inf
    arrays[-1] = mask
    for t, signature, config, kernel in planned(layer, gpu, most=14):
        if t.name == "cuda/attention" and signature.inputs[-1].dtype.name == "f32":
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            with np.errstate(all="ignore"):
                want = reference(layer, fed)[0]
            assert np.isnan(want[:, 7]).all()
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")


def test_machines_are_asked_nothing_that_they_have_not():
    layer, _ = layer_of(1, 2, 16, 16, 64, layout="rows")
    old = CompileOnlyGpu("sm_80")
    tactic = Attention()
    for signature in tactic.signatures(layer, old):
        assert tactic.refuses(layer, signature, old) is None, "mma.sync and cp.async exist from sm_80 on"

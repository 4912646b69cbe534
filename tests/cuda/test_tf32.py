"""f32 tensors on tensor cores: packing against the read order of threads, machine code, and on a GPU the error of real layer sizes."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, SAMPLES, compute, judge, planned, reach, reference
from test_tactics import sample_layer as sample_at

from support.selection import with_long_variants
from whet.backends.cuda.compile import compile_cubin
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.builder.verify.emulation import round_to_tf32
from whet.cli._exec_config import list_tactic_sources
from whet.network import F32
from whet.ops import OPS, Sample, sample_layer
from whet.tactics import get_tactic
from whet.tactics.cuda.conv._tf32 import Tf32Config, compute_channel_order, cut_to_tf32, emit_tf32_source, list_configs, pack


def multiplied(row, bk):
    """The inputs of lane q of a quad in step i: of the bk/4 adjacent values that it reads, index q has value i, index q + 4 value i + bk/8."""
    found = np.empty((bk // 8, 8), row.dtype)
    for i in range(bk // 8):
        for q in range(4):
            kept = row[bk // 4 * q : bk // 4 * (q + 1)]
            found[i, q], found[i, q + 4] = kept[i], kept[i + bk // 8]
    return found


@pytest.mark.parametrize("bk", [8, 16, 32])
def test_weights_have_the_order_of_the_inputs(bk):
    rows = np.arange(19 * 2 * bk, dtype=np.float32).reshape(19, 2 * bk) % 2048
    packed = pack(rows, bk, 1).reshape(32, 2, bk // 8, 8)
    for tile in range(2):
        for lane in range(4):  # of a quad: its accumulators of columns 8j + 2 lane + e are channels 4 lane ... 4 lane + 3 of sixteen
            for i, column in enumerate([2 * lane, 2 * lane + 1, 8 + 2 * lane, 9 + 2 * lane]):
                k = 16 * tile + 4 * lane + i
                for step in range(2):
                    want = multiplied(rows[k, step * bk : (step + 1) * bk], bk) if k < 19 else 0
                    np.testing.assert_array_equal(packed[16 * tile + column, step], want)
    assert sorted(compute_channel_order(bk)) == list(range(bk))


def undealt(rows):
    """Rows before they were permuted in groups of 16."""
    return rows.reshape(-1, 2, 4, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def test_three_products_keep_21_bits():
    random = np.random.default_rng(0)
    w = (random.standard_normal((5, 64)) * 10.0 ** random.integers(-8, 8, (5, 64))).astype(np.float32)
    both = pack(w, 32, 3).astype(np.float64)
    whole = undealt(both[:16]) + undealt(both[16:])
    assert np.abs(whole[:5] / pack_plain(w) - 1).max() <= 2.0**-21
    assert not whole[5:].any()
    assert np.all(pack(w, 32, 3).view(np.uint32) & 0x1FFF == 0), "the tensor cores truncate no bits"


def pack_plain(w):
    return np.ascontiguousarray(w.reshape(5, -1, 32)[:, :, compute_channel_order(32)]).reshape(5, -1).astype(np.float64)


def test_rounding_equals_the_reference_and_keeps_large_values_finite():
    a = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(cut_to_tf32(a), round_to_tf32(a))
    extreme = np.array([3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45], np.float32)
    cut = cut_to_tf32(extreme)
    assert np.isfinite(cut[:2]).all()
    np.testing.assert_array_equal(cut[2:4], extreme[2:4])
    assert np.isnan(cut[4])
    assert np.isnan(pack(np.full((1, 8), np.nan, np.float32), 8, 3)[0]).all()


def test_an_infinite_input_stays_infinite_in_three_products():
    """Infinity times the high part and times the low part of a weight have the same sign, and neither is infinity times zero."""
    w = np.array([[1.0, -1.0, 0.3, -0.3, 1 + 2**-12, -5e-20, 2.0**-120, 1e30]], np.float32)
    both = pack(w, 8, 3)[::16]  # the first of sixteen rows of both parts
    w = w[:, compute_channel_order(8)]
    with np.errstate(invalid="raise"):
        products = np.float32(np.inf) * both
    np.testing.assert_array_equal(products[0] + products[1], np.float32(np.inf) * w[0])
    assert not pack(np.zeros((1, 8), np.float32), 8, 3).any(), "zero weights stay zero: infinity times zero is no number"


KERNELS = [
    (Tf32Config(1, 64, 32, 4), True, "clip", False, False),
    (Tf32Config(2, 128, 32, 4), True, "silu", False, False),
    (Tf32Config(1, 256, 32, 4), False, "clip", False, False),
    (Tf32Config(3, 64, 32, 4), True, "clip", False, True),
    (Tf32Config(1, 128, 32, 3, blocks=2), True, "clip", False, False),
    (Tf32Config(1, 32, 32, 3, blocks=5), True, "silu", False, False),
    (Tf32Config(2, 32, 32, 3, blocks=3), True, "silu", False, False),
    (Tf32Config(1, 64, 32, 3, blocks=4), False, "mish", False, False),
    (Tf32Config(2, 64, 32, 4, blocks=2), True, "gelu", False, True),
    (Tf32Config(3, 128, 32, 3), True, "silu", False, False),
    (Tf32Config(1, 96, 32, 2, blocks=4), False, "silu", True, False),
    (Tf32Config(2, 192, 32, 2), True, "clip", False, False),
    (Tf32Config(1, 32, 32, 4, sk=8), True, "clip", True, False),
    (Tf32Config(2, 64, 16, 4, sk=4), False, "clip", False, False),
    (Tf32Config(1, 16, 8, 4), True, "clip", False, False),
    (Tf32Config(1, 64, 32, 4, terms=3), True, "clip", False, False),
    (Tf32Config(1, 96, 32, 2, terms=3), False, "clip", True, False),
    (Tf32Config(2, 32, 32, 4, terms=3), True, "gelu", False, False),
    (Tf32Config(1, 64, 32, 3, sk=4, terms=3), True, "clip", False, True),
]


@pytest.mark.parametrize(("config", "im2col", "kind", "odd", "grouped"), with_long_variants(KERNELS), ids=str)
def test_machine_code(config, im2col, kind, odd, grouped, tmp_path):
    assert config.valid()
    text = sass(compile_cubin(emit_tf32_source(config, im2col, kind, odd, grouped)), tmp_path)
    assert re.search(rf"HGMMA\.64x{config.bn}x8\.F32\.TF32", text)
    assert ("UTMALDG.4D.IM2COL" if im2col else "UTMALDG") in text
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"
    assert "BRA.U.ANY" not in text
    assert odd or "STG.E.128" in text, "results are stored 16 bytes at a time"
    assert ("STAS.128" in text) == (config.sk > 1), "other blocks receive their parts 16 bytes at a time"
    assert "STAS.64" not in text
    products, waits = text.count("HGMMA"), text.count("WARPGROUP.DEPBAR")
    assert waits < products or config.bk == 8, "products of a step are issued without waits between them"


def test_no_tf32_disables_every_tactic_that_rounds_to_tf32():
    rounding = set()
    for op, i in SAMPLES:
        layer, _ = sample_at(op, i)
        rounding |= {t.name for t, _, config, _ in planned(layer, HOPPER, most=1) if ("math", "tf32") in config}
    assert {"cuda/stem_tf32", "cuda/few_channel_conv_tf32", "cuda/multi_tensor_conv_tf32", "cuda/conv_tf32"} <= rounding
    left = {t.name for t in list_enabled_tactics("cuda", list_tactic_sources({"backend": "cuda", "tacticSources": "+CUDNN", "noTF32": "noTF32"}))}
    assert not left & rounding
    split = {"cuda/conv_3xtf32", "cuda/conv_transpose_3xtf32"}  # operands are sums of TF32 parts, as accurate as f32
    assert split <= left
    assert not {name for name in left - split if "tf32" in name}


def test_a_switch_names_a_tactic_before_a_family():
    def off(*switches):
        return {t.name for t in list_enabled_tactics("cuda")} - {t.name for t in list_enabled_tactics("cuda", switches)}

    assert off("-conv") == {"cuda/conv"}
    assert off("-CONV") >= {"cuda/conv", "cuda/conv_sum", "cuda/conv_tf32"}
    assert off("-OWN") >= {"cuda/conv", "cuda/few_channel_conv", "cuda/qgemm", "cuda/reformat"}
    assert not {name for name in off("-OWN") if "cublaslt" in name or "host" in name}


def with_tf32_operands(own, layer, x, w, *operands):
    return own(layer, cut_to_tf32(x), cut_to_tf32(w), *operands)


def test_tf32_operands_stay_within_the_bound_of_its_tactics(monkeypatch):
    """Every sample with operands rounded as by tensor cores: the bound of the kernels accepts it, and rejects ten times the error."""
    bounded, tf32 = set(), get_tactic("cuda/conv_tf32")
    for op, i in SAMPLES:
        layer, arrays = sample_at(op, i)
        if tf32.why_not(layer) or any(a is not None and not np.isfinite(a).all() for a in arrays):
            continue
        want = reference(layer, arrays)
        with monkeypatch.context() as patch:
            for name in ("Conv", "Gemm", "MatMul"):
                patch.setitem(OPS, name, replace(OPS[name], reference=partial(with_tf32_operands, OPS[name].reference)))
            got = reference(layer, arrays)
        accumulators = reach(layer, arrays)
        for g, w in zip(got, want, strict=True):
            judge(g, w, tf32.rtol, F32, f"{op} {i}", accumulators)
            if accumulators:
                bounded.add(next(x.op for x in layer.regions["body"].layers if x.output is layer.regions["body"].outputs[0]))
                with pytest.raises(AssertionError):
                    judge(w + 10 * (g - w), w, tf32.rtol, F32, f"{op} {i}", accumulators)
    assert "Sigmoid" in bounded


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize(
    ("m", "k", "c", "taps"), [(49, 512, 512, 9), (3136, 64, 64, 9), (401408, 64, 64, 9), (1, 1000, 2048, 1), (128, 3072, 768, 1), (12544, 64, 28, 7)]
)
def test_every_shape_has_candidates_that_fit(m, k, c, taps, terms):
    found = list_configs(m, k, c, taps, terms, 132)
    assert len(found) >= 3
    assert all(f.valid() and f.terms == terms for f in found)


def layer_of(op, shapes, attributes):
    return sample_layer(op, Sample(shapes, attributes))[1:]


LAYERS = [
    ("Conv", ["f32[2,64,20,19]", "const f32[96,64,3,3]", "const f32[96]"], {"pads": (1, 1, 1, 1)}),
    ("Conv", ["f32[1,512,7,7]", "const f32[512,512,3,3]", None], {"pads": (1, 1, 1, 1)}),
    ("Conv", ["f32[2,3,37,41]", "const f32[64,3,7,7]", "const f32[64]"], {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ("Conv", ["f32[2,48,15,15]", "const f32[51,48,3,3]", "const f32[51]"], {"pads": (2, 2, 2, 2), "dilations": (2, 2), "strides": (2, 1)}),
    ("Conv", ["f32[2,128,14,14]", "const f32[128,4,3,3]", "const f32[128]"], {"pads": (1, 1, 1, 1), "group": 32}),
    ("Conv", ["f32[1,12,14,14]", "const f32[24,12,3,3]", "const f32[24]"], {"pads": (1, 1, 1, 1)}),
    ("Gemm", ["f32[7,2048]", "const f32[1000,2048]", "const f32[1000]"], {"transB": 1}),
    ("MatMul", ["f32[2,65,768]", "const f32[768,250]"], {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_real_sizes_match_the_reference(gpu, case):
    layer, arrays = layer_of(*case)
    want = reference(layer, [None if a is None else a.astype(np.float64) for a in arrays])[0]
    ran = set()
    for t, signature, config, kernel in planned(layer, gpu, most=20):
        if t.name in ("cuda/conv_tf32", "cuda/conv_3xtf32"):
            got, _ = compute(gpu, layer, arrays, signature, kernel)
            error = np.linalg.norm(got[0] - want) / np.linalg.norm(want)
            print(f"{t.name} {config}: {error:.2e}, worst {np.abs(got[0] - want).max() / np.abs(want).max():.2e}")
            judge(got[0], want, kernel.rtol, signature.outputs[0].dtype, f"{t.name} {config}")
            assert error <= (4e-4 if t.name == "cuda/conv_tf32" else 2e-6), "operands are rounded to nearest: no shrinking"
            ran.add(t.name)
    assert len(ran) == 2

"""Norms and attention that store 8 bits, and 8-bit products that store 16 bits: their forms, machine code, and on a GPU every tile."""

import re

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import HOPPER, compute, judge, reference

from support.compiling import first_configs
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig
from whet.builder.lowering import lower_network
from whet.builder.verify.differences import compare_output
from whet.composites.attention import make_attention_sample
from whet.composites.quantized import make_quantized_sample
from whet.composites.quantized_result import make_quantized_attention_sample, make_quantized_norm_sample
from whet.network import F8E4M3, parse_network
from whet.ops import sample_layer
from whet.tactics._attention import match_attention
from whet.tactics._base import PlanRefused, get_tactic
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.attention import attention_fused as fused
from whet.tactics.cuda.conv._conv import EightBitTypes
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import Features, emit_conv_source
from whet.tactics.cuda.conv.conv import as_config

RESULT, PRODUCT = get_tactic("cuda/quantized_result"), get_tactic("cuda/qgemm")
I8, U8, F8 = (0.02, np.int8(-3)), (0.015, np.uint8(120)), (0.01, None)


def layer_of(sample):
    return sample_layer("Fused", sample)[1:]


def make_product_sample(rows, inner, columns, *, residual=False, act="", kind="i8", store=None):
    """x @ w + bias, activated or with a residual in floating point, of 8-bit rows; `store` as in make_quantized_sample."""
    rng = np.random.default_rng(7)
    w = rng.integers(-127, 128, (inner, columns)).astype(np.int8)
    if kind == "f8e4m3":
        w = (rng.standard_normal((inner, columns)) * 100).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scales = (rng.uniform(0.5, 2, columns) / (70 * np.sqrt(inner))).astype(np.float32)

    def build(body, values):
        y = body.add("Add", body.add("MatMul", *values[:2]), values[2])
        y = body.add(act, y) if act else y
        return body.add("Add", y, values[3]) if residual else y

    x = f"f8e4m3[{rows},{inner}]" if kind == "f8e4m3" else f"full {kind}[{rows},{inner}]"
    data = [(x, 0.02, None if kind == "f8e4m3" else 0, 1), (w, scales, None, 1), rng.standard_normal(columns).astype(np.float32)]
    return make_quantized_sample("MatMul", data + ([f"f32[{rows},{columns}]"] if residual else []), build, store)


def test_the_result_is_stored_in_both_types():
    layer, _ = layer_of(make_quantized_norm_sample("f32[3,40,768]", I8, keeps=True))
    stored = [tuple(o.dtype.name for o in s.outputs) for s in RESULT.signatures(layer, HOPPER)]
    assert stored == [("f16", "i8"), ("bf16", "i8"), ("f32", "i8")]
    attention, _ = layer_of(make_quantized_attention_sample(F8, 1, 2, 40, 40, 64, layout="rows"))
    assert [[o.dtype.name for o in s.outputs] for s in RESULT.signatures(attention, HOPPER)] == [["f8e4m3"]] * 2


def test_refusals_say_why():
    attention, _ = layer_of(make_quantized_attention_sample(I8, 1, 2, 40, 40, 64, layout="rows"))
    signature = RESULT.signatures(attention, HOPPER)[0]
    assert "Hopper" in RESULT.refuses(attention, signature, CompileOnlyGpu("sm_80"))
    attention.regions["body"].outputs.insert(0, attention.regions["body"].layers[0].output)
    attention.outputs = (attention.outputs[0], attention.outputs[0])
    assert RESULT.why_not(attention) == "attention stores its result once"
    norm, _ = layer_of(make_quantized_norm_sample("f32[6,48]", F8))
    norm.regions["body"].layers[1].attrs["saturate"] = 0
    assert "saturate" in RESULT.why_not(norm)


BLOCK = """network block source
in %x: f32[2,24,32]
const %g: f32[32] = seed(1)
const %b: f32[32] = seed(2)
const %w: i8[32,32] = seed(3)
const %ws: f32[32] = seed(4)
const %s: f32[] = [0.05]
const %z: i8[] = [0]
%n = LayerNormalization(%x, %g, %b) from "norm"
%q = QuantizeLinear(%n, %s, %z)
%d = DequantizeLinear(%q, %s, %z)
%dw = DequantizeLinear(%w, %ws, axis=1)
%m = MatMul(%d, %dw) from "product"
%y = Add(%m, %n) from "residual"
out %y
"""


@pytest.mark.parametrize(("backend", "kinds"), [("cuda", ["QuantizedResult", "MatMul"]), ("cpu", ["LayerNormalization", "QuantizeLinear", "MatMul"])])
def test_only_a_backend_with_a_kernel_gets_the_layer(backend, kinds):
    lowered, _ = lower_network(parse_network(BLOCK), BuildConfig(backend=backend, precisions=("int8",)))
    assert [x.composite or x.op for x in lowered.layers] == kinds


@pytest.mark.parametrize("stored", [3, 4, 5])
@pytest.mark.parametrize("shape", [(32, 12, 128, 128, 64), (32, 12, 197, 197, 64), (1, 12, 128, 128, 64)], ids=str)
def test_attention_with_8_bit_results_has_no_spills(stored, shape, tmp_path):
    heads = match_attention(layer_of(make_attention_sample(*shape, layout="merged", scale="Mul"))[0])
    tile = fused.list_tiles(heads, fused.MaskForm(), 132)[0]
    text = sass(compile_cubin(emit_kernel_source("attention_fused.cu", fused.make_constants(heads, fused.MaskForm(), tile, False, stored))), tmp_path)
    assert "HGMMA" in text
    assert ("F2FP.SATFINITE.E4M3" in text or "E4M3" in text) == (stored == 5)
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


STAGED = [ConvConfig(2, 1, 192, 128, 4, size=1), ConvConfig(3, 1, 128, 128, 4, size=1), ConvConfig(3, 1, 64, 128, 6, size=1), ConvConfig(2, 1, 96, 128, 4, size=1)]


@pytest.mark.parametrize("tile", STAGED, ids=str)
@pytest.mark.parametrize("source", ["i8", "f8e4m3"])
def test_products_with_16_bit_results_through_shared_memory_have_no_spills(tile, source, tmp_path):
    features = Features(types8=EightBitTypes(source, "f16", "f16"))
    assert features.shared(tile) == tile.shared + tile.bm * tile.bn
    text = sass(compile_cubin(emit_conv_source(tile, features)), tmp_path)
    assert "UTMASTG" in text, "results are stored from shared memory"
    assert not re.search(r"\b(LDL|STL)\b", text), "no register spills"


def test_large_tiles_take_16_bit_results():
    layer, _ = layer_of(make_product_sample(4096, 768, 768, residual=True))
    signatures = {s.outputs[0].dtype.name: s for s in PRODUCT.signatures(layer, HOPPER)}
    staged = {(dict(c)["wgs"], dict(c)["bn"]) for c in PRODUCT.configs(layer, signatures["f16"], HOPPER) if not dict(c)["direct"]}
    assert {(2, 192), (3, 128)} <= staged
    assert all(dict(c)["direct"] or dict(c)["sk"] > 1 for c in PRODUCT.configs(layer, signatures["f32"], HOPPER)), "32-bit results are too large"
    with pytest.raises(PlanRefused, match="cannot store"):
        PRODUCT.plan(layer, signatures["f16"], as_config(ConvConfig(2, 1, 192, 128, 4, outs=2, size=1)), HOPPER)


GELU = [("i8", (0.02, 0, "i8")), ("f8e4m3", (0.02, None, "f8e4m3")), ("i8", None)]


@pytest.mark.parametrize(("source", "result"), [("i8", "i8"), ("f8e4m3", "f8e4m3"), ("i8", "f16")])
def test_gelu_of_small_results_takes_one_special_function(source, result, tmp_path):
    tile = ConvConfig(2, 1, 128, 128, 4, size=1)
    text = sass(compile_cubin(emit_conv_source(tile, Features(activation="gelu", types8=EightBitTypes(source, result)))), tmp_path)
    assert text.count("MUFU.TANH") == 64, "one for each result of a thread"
    assert "MUFU.EX2" not in text


# On a GPU

NORMS = [
    ("f32[4096,768]", I8, {"keeps": True}), ("f32[4096,768]", F8, {"keeps": True}), ("f32[32,197,768]", I8, {}), ("f32[7,33]", U8, {"keeps": True}),
    ("f32[5,1030]", F8, {}), ("f32[40,2048]", I8, {"rms": True}), ("f32[3,5000]", U8, {"rms": True, "keeps": True}),
]  # fmt: skip
HEADS = [
    ((32, 12, 128, 128, 64), {"layout": "merged", "scale": "Mul"}), ((8, 12, 197, 197, 64), {"layout": "merged", "scale": "Mul"}),
    ((1, 12, 128, 128, 64), {"layout": "rows"}), ((2, 4, 130, 130, 64), {"layout": "rows", "causal": -np.inf}), ((1, 2, 20, 30, 40), {"layout": "rows"}),
    ((2, 3, 24, 40, 72), {"layout": "rows", "mask": (2, 1, 1, 40)}), ((1, 2, 600, 600, 128), {"layout": "rows"}),
]  # fmt: skip


def check(gpu, tactic, layer, arrays, most):
    """Every configuration's outputs against the reference, as verification compares them."""
    ran = 0
    for signature in tactic.signatures(layer, gpu):
        if tactic.refuses(layer, signature, gpu):
            continue
        for config in first_configs(tactic, layer, signature, gpu, most):
            kernel = tactic.plan(layer, signature, config, gpu)
            got, fed = compute(gpu, layer, arrays, signature, kernel)
            for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
                where = f"{tactic.name} {signature} {config}"
                if o.dtype.bits == 8:
                    error, why = compare_output(g, w, o.dtype, kernel.rtol)
                    assert error <= (kernel.rtol if o.dtype == F8E4M3 else 0.0), f"{where}: {why or error}"
                else:
                    judge(g, w, kernel.rtol, o.dtype, where)
            ran += 1
    assert ran


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "store", "how"), NORMS, ids=str)
def test_norms_match_the_reference(gpu, x, store, how):
    check(gpu, RESULT, *layer_of(make_quantized_norm_sample(x, store, **how)), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("store", [(0.006, np.int8(2)), (0.006, np.uint8(128)), (0.002, None)], ids=["i8", "u8", "f8"])
@pytest.mark.parametrize(("sizes", "how"), HEADS, ids=str)
def test_attention_matches_the_reference(gpu, sizes, how, store):
    check(gpu, RESULT, *layer_of(make_quantized_attention_sample(store, *sizes, **how)), 6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["i8", "u8", "f8e4m3"])
@pytest.mark.parametrize(("rows", "inner", "columns", "residual"), [
    (4096, 768, 768, True), (4096, 768, 2304, False), (4096, 3072, 768, True), (6304, 768, 776, True), (3100, 272, 104, False), (3000, 64, 96, True),
], ids=str)  # fmt: skip
def test_products_with_16_bit_results_match_the_reference(gpu, rows, inner, columns, residual, kind):
    check(gpu, PRODUCT, *layer_of(make_product_sample(rows, inner, columns, residual=residual, kind=kind)), 16)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "store"), GELU, ids=str)
def test_products_with_gelu_match_the_reference(gpu, kind, store):
    check(gpu, PRODUCT, *layer_of(make_product_sample(4096, 768, 3072, act="Gelu", kind=kind, store=store)), 6)

"""Generated code for fused data movement with arithmetic: compiled for the host and compared with the reference, element by element."""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_compile import sass
from test_tactics import compute, judge, reference

from support.host_cuda import compile_for_host, host_compiler
from support.selection import with_long_variants
from whet import zoo
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder import BuildConfig, build
from whet.builder.precision.int8 import prepare
from whet.composites.moves import make_detector_head_sample
from whet.frontends.onnx import network_from_onnx
from whet.network import Network, parse_network, parse_type, static_shape, to_stored
from whet.ops import OPS, run_network, run_regions, sample_layer
from whet.passes import lower
from whet.precision import Range, Ranges, find_quantization_sites, quantize
from whet.pruning.latency_cost import lower_to_static_layers
from whet.tactics import get_tactic, is_quantized, list_tactics
from whet.tactics._moves_indices import Refused
from whet.tactics.cuda._device.source import emit_kernel_source, list_kernel_paths
from whet.tactics.cuda.move._moves import MovesCode
from whet.tactics.cuda.move.moves import make_macros, match_moves

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _half import half

HOPPER = CompileOnlyGpu()
SAMPLES = [i for i, s in enumerate(OPS["Fused"].samples) if s.attrs["composite"] == "Moves"]
COMPILER = host_compiler()
HOST = """
typedef unsigned int u32;
struct Act { float a, b; };
struct Args { const float* in[4]; const float* constants; };
static float __int_as_float(u32 v) { float f; __builtin_memcpy(&f, &v, 4); return f; }
template <int KIND> float activate(float x, Act) { return KIND == 4 ? 1.f / (1.f + __builtin_expf(-x)) : x > 0.f ? x : 0.f; }
#define DEV inline
#define MANY EACH
ROWS
#define EVERY(...) for (u32 i = 0; i < EACH; ++i) { const Row row{first, i, true}; __VA_ARGS__ }
static float element(const Args& p, u32 at, u32 element_row, u32 column) {
    auto source = [&](int i, u32 place) { return p.in[i][place]; };
    float values[EACH];
    const u32 first = element_row / EACH * EACH, row = first;
    STEPS
    return values[element_row - first];
}
extern "C" void run(const float** in, const float* constants, float* out, u32 count) {
    Args p;
    for (int i = 0; i < 4; ++i) p.in[i] = in[i];
    p.constants = constants;
    for (u32 i = 0; i < count; ++i) out[i] = element(p, i, i / WIDE, i % WIDE);
}
"""


def on_host(moves, arrays, count, together=1):
    """Computes all elements by the generated code."""
    rows = re.search(r"struct Row \{.*?(?=#define)", list_kernel_paths()["moves.cu"].read_text(), re.DOTALL)[0]
    code = HOST.replace("STEPS", moves.text).replace("WIDE", str(moves.row or 1)).replace("ROWS", rows)
    library = compile_for_host(f"#define EACH {together}\n{code}", "-O1")
    pointer = ctypes.POINTER(ctypes.c_float)
    held = [np.ascontiguousarray(a, np.float32).reshape(-1) for a in arrays]
    given = (pointer * 4)(*(a.ctypes.data_as(pointer) for a in held))
    numbers, out = moves.numbers, np.zeros(count, np.float32)
    library.run(given, numbers.ctypes.data_as(pointer), out.ctypes.data_as(pointer), count)
    return out


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to run the generated code with")
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("form", ["nhwc", "linear"])
@pytest.mark.parametrize("i", SAMPLES)
def test_the_code_matches_the_reference(i, form, rows):
    _, layer, arrays = sample_layer("Fused", OPS["Fused"].samples[i])
    (want,) = run_regions(layer, arrays)
    places = [k for k, t in enumerate(layer.inputs) if t is not None and not t.is_constant]
    out = form if want.ndim == 4 else "linear"
    made = MovesCode(layer, dict.fromkeys(places, form), out, rows)
    got = on_host(made, [to_stored(arrays[k], form) for k in places], want.size)
    np.testing.assert_allclose(got, np.asarray(to_stored(want, out)).reshape(-1), rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(COMPILER is None, reason="there is no g++ to run the generated code with")
@pytest.mark.parametrize("together", [2, 4, 8])
@pytest.mark.parametrize("i", SAMPLES)
def test_grouped_rows_match_the_reference_or_are_refused(i, together):
    sample = OPS["Fused"].samples[i]
    _, layer, arrays = sample_layer("Fused", sample)
    (want,) = run_regions(layer, arrays)
    places = [k for k, t in enumerate(layer.inputs) if t is not None and not t.is_constant]
    try:
        made = MovesCode(layer, dict.fromkeys(places, "nhwc"), "linear", True, together)
    except Refused:
        images = want.ndim != 4 and all(arrays[k].ndim == 4 for k in places)
        ends = np.cumsum([arrays[k].shape[2] * arrays[k].shape[3] for k in places]) if images else []
        assert not images or any(int(e) * layer.inputs[1].shape[1] % together for e in ends)
        return
    got = on_host(made, [to_stored(arrays[k], "nhwc") for k in places], want.size, together)
    np.testing.assert_allclose(got, want.reshape(-1), rtol=2e-6, atol=1e-6)


def test_groups_that_cross_a_level_are_refused():
    _, layer, _ = sample_layer("Fused", make_detector_head_sample(1, 1, 80, (2, 3), (2, 5)))
    formats = {i: "nhwc" for i, t in enumerate(layer.inputs) if not t.is_constant}
    assert MovesCode(layer, formats, "linear", True, 2).row == 85
    with pytest.raises(Refused, match="4 consecutive rows"):
        MovesCode(layer, formats, "linear", True, 4)


def yolo_head(images):
    """The box decoding of YOLOv5s at 640x640 as a build forms it, its arrays, its FP16 signature and its configurations with grouped rows."""
    net = network_from_onnx(zoo.build("yolov5s"))
    shape = {t.name: (images, 3, 640, 640) for t in net.inputs}
    layers = lower_to_static_layers(net, BuildConfig(backend="cuda", precisions=("fp16",), profiles=((shape, shape, shape),)), filled=True)
    (layer,) = [x for x in layers.values() if x.composite == "Moves"]
    rng, tactic = np.random.default_rng(5), get_tactic("cuda/moves")
    arrays = [t.array() if t.is_constant else rng.standard_normal(static_shape(t.shape)).astype(np.float32) for t in layer.inputs]
    (signature,) = [s for s in tactic.signatures(layer, HOPPER) if str(s.needs(0)) == "f16:nhwc" and str(s.outputs[0]) == "f32:linear"]
    return layer, arrays, signature, [c for c in tactic.configs(layer, signature, HOPPER) if "together" in dict(c)]


def test_grouped_rows_load_first_and_store_16_bytes(tmp_path):
    layer, _, signature, configs = yolo_head(8)
    assert [dict(c)["together"] for c in configs] == [4, 4, 8, 8]
    for config in configs:
        constants = make_macros(match_moves(layer, signature, config), signature, config)
        text = sass(compile_cubin(emit_kernel_source("moves.cu", constants)), tmp_path)
        many = dict(config)["together"] * 3  # elements of a thread, from each of three levels
        assert text.count("LDG.E.U16") == 3 * many
        level = text[: text.index("MUFU.EX2")]
        assert level.count("LDG.E.U16") == many
        assert text.count("LDG.E R") == 3 * dict(config)["together"]  # grid and sizes of a row in one load
        assert level.count("LDG.E R") >= dict(config)["together"] - 2  # the last load may come after the first arithmetic
        assert not re.search("LDL|STL", text)
        if "bulk" in dict(config):
            assert re.findall(r"UBLKCP|STG", text) == ["UBLKCP"]
        else:
            assert re.findall(r"STG\S*", text) == ["STG.E.EF.128"] * -(-dict(config)["together"] * 85 * 4 // 512)


def test_grouped_rows_are_listed_first():
    """A level times a limited number of kernels of a layer, some per signature, in list order; otherwise YOLOv5s takes 36 us instead of 30."""
    layer, _, signature, configs = yolo_head(8)
    assert get_tactic("cuda/moves").configs(layer, signature, HOPPER)[: len(configs)] == configs
    assert dict(configs[0]) == {"together": 4, "bulk": 1}


@pytest.mark.gpu
def test_every_config_matches_the_reference(gpu):
    _, layer, arrays = sample_layer("Fused", make_detector_head_sample(2, 3, 80, (8, 8), (4, 4)))
    tactic, seen = get_tactic("cuda/moves"), set()
    for signature in tactic.signatures(layer, gpu):
        for config in tactic.configs(layer, signature, gpu):
            kernel = tactic.plan(layer, signature, config, gpu)
            (got,), fed = compute(gpu, layer, arrays, signature, kernel)
            judge(got, reference(layer, fed)[0], kernel.rtol, signature.outputs[0].dtype, f"{signature} {config}")
            seen.add(kernel.implementation)
    assert {"moves by 4 rows together", "moves by 8 rows together"} <= seen


@pytest.mark.gpu
def test_wide_stores_equal_single_stores_bit_for_bit(gpu):
    layer, arrays, signature, configs = yolo_head(2)
    tactic = get_tactic("cuda/moves")
    results = [compute(gpu, layer, arrays, signature, tactic.plan(layer, signature, c, gpu))[0][0] for c in [(("rows", 1),), *configs]]
    for got in results[1:]:
        np.testing.assert_array_equal(got, results[0])


@pytest.mark.parametrize("i", with_long_variants(SAMPLES, every=2))
def test_the_code_compiles_for_gpus(i):
    _, layer, _ = sample_layer("Fused", OPS["Fused"].samples[i])
    tactic = next(t for t in list_tactics("cuda") if layer.composite in t.composites)
    for signature in tactic.signatures(layer, HOPPER)[::3]:
        assert tactic.refuses(layer, signature, HOPPER) is None
        wide = [c for c in tactic.configs(layer, signature, HOPPER) if "together" in dict(c)]
        for config in ((), (("rows", 1),), (("rows", 4),), *wide):
            text = emit_kernel_source("moves.cu", make_macros(match_moves(layer, signature, config), signature, config))
            for arch in ("sm_90a", "sm_80") if config in wide and "bulk" not in dict(config) else ("sm_90a",):
                compile_cubin(text, name="moves.cu", arch=arch)


@pytest.mark.parametrize("stored", ["f32", "f16"])
def test_a_detector_decodes_its_boxes_in_one_launch(stored, standin_gpu):
    model = zoo.build("yolov5s", image=320)
    net = network_from_onnx(half(model) if stored == "f16" else model)
    shape = {t.name: tuple(d if isinstance(d, int) else 2 for d in t.shape) for t in net.inputs}
    config = BuildConfig(backend="cuda", precisions=("fp16",), profiles=((shape, shape, shape),), timing_cache="", verify=False, avg_timing=1)
    plan = build(net, config)
    (last,) = [x for x in plan.network.layers if x.composite == "Moves"]
    assert last is plan.network.layers[-1]
    assert static_shape(last.outputs[0].shape[1:]) == (6300, 85)
    assert not {x.op for x in plan.network.layers} & {"Transpose", "Split", "Sigmoid", "Reformat"}
    assert [f for f, _ in (o for o in plan.choices[last.name].inputs if o)] == ["nhwc"] * 3


HEAD = """network head source
in %x: f32[2,16,6,5]
const %w: f32[21,16,1,1] = seed(1)
const %v: f32[21] = seed(2)
const %s: i64[5] = [2, 3, 7, 6, 5]
const %n: i64[2] = [2, 5]
const %r: i64[3] = [2, 90, 7]
%i = Relu(%x)
%c = Conv(%i, %w, %v) from "conv"
%a = Reshape(%c, %s)
%t = Transpose(%a, perm=(0,1,3,4,2))
%b = Sigmoid(%t)
%p, %q = Split(%b, %n, axis=4)
%m = Tanh(%p)
%j = Concat(%m, %q, axis=4)
%y = Reshape(%j, %r)
out %y
"""


@pytest.mark.parametrize("integers", [False, True])
def test_channel_padding_changes_nothing(integers):
    net = parse_network(HEAD)
    if integers:
        made = prepare(net, BuildConfig())
        net = quantize(made, Ranges({t.name: Range(0.0, 3.0) for t in find_quantization_sites(made).roots}))
    x = {"x": np.random.default_rng(3).standard_normal((2, 16, 6, 5)).astype(np.float32)}
    plain, _ = lower(net, switches=["-pad_moved_channels", "-fuse_head_convs"], refuses=lambda layer: None)
    wide, log = lower(net, switches=["-fuse_head_convs"], refuses=lambda layer: None)
    assert log.counts()["pad_moved_channels"] == 1
    conv = next(t.maker for x in wide.layers if x.composite == "Moves" for t in x.inputs if t.maker is not None)
    assert conv.outputs[0].shape[1] == 32
    assert conv.sources == ("conv",)
    assert (is_quantized(conv)) == integers
    for a, b in zip(run_network(plain, x).values(), run_network(wide, x).values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    layer = next(x for x in wide.layers if x.composite == "Moves")
    tactic = next(t for t in list_tactics("cuda") if "Moves" in t.composites)
    assert any(tactic.refuses(layer, s, HOPPER) is None for s in tactic.signatures(layer, HOPPER))


@pytest.mark.parametrize(("perm", "formats"), [((0, 2, 3, 1), {("nhwc", "linear")}), ((0, 3, 1, 2), {("linear", "nhwc")}), ((0, 1, 3, 2), set())])
def test_transposes_to_and_from_channels_last_are_views(perm, formats):
    net = Network("net", "lowered")
    layer = net.add_layer("Transpose", [net.add_input("x", parse_type("f32[2,5,3,4]"))], {"perm": perm})
    found = get_tactic("cuda/view").signatures(layer, HOPPER)
    assert {(s.inputs[0].format, s.outputs[0].format) for s in found} == formats
    assert {s.outputs[0].dtype.name for s in found if s.inplace} == ({"f16", "bf16", "f32"} if formats else set())

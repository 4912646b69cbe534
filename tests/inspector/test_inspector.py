"""Layer information, profiles and explanations: TensorRT's structure and terms, plus whet's own fields."""

import dataclasses
import json

import numpy as np
import pytest
from trex_rules import FORMATS, check_layers, check_profile

from handmade import PlainBackend, blocked_conv_net, conv_net, make_plan
from whet import zoo
from whet.builder import BuildConfig, build
from whet.cli.explain import describe_selection
from whet.engine import Candidate, LayerTimes, engine_bytes, read_engine
from whet.engine.report import PassFired, PassRecord, PassSkipped
from whet.errors import UsageError
from whet.frontends import network_from_onnx
from whet.inspector import engine_information, explain, layer_facts, layer_lines, layer_rows, output_records, profile_records, times_records
from whet.inspector.alignment import format_setting
from whet.inspector.layers import has_two_of_four
from whet.inspector.words import TYPE, format_words
from whet.network import FORMATS as FORMATS_OF_WHET
from whet.network import Network, parse_type
from whet.runtime import Runtime


def fused_net():
    """Conv + residual + Relu, depthwise conv, pooling, pointwise, Gemm: one of most kinds."""
    net = Network("kinds", "lowered")
    x = net.add_input("x", parse_type("f32[2,8,16,16]"))
    w = net.constant(np.ones((8, 8, 3, 3), "f4"), "w")
    b = net.constant(np.ones(8, "f4"), "b")
    body = Network("body", "lowered")
    bx, bw, bb, bz = (body.add_input(n, t.type) for n, t in (("x", x), ("w", w), ("b", b), ("z", x)))
    y = body.add("Conv", bx, bw, bb, pads=(1, 1, 1, 1))
    body.mark_output(body.add("Relu", body.add("Add", y, bz)))
    a = net.add("Fused", x, w, b, x, composite="Conv", regions={"body": body}, sources=["conv", "add", "relu"], name="f")
    dw = net.constant(np.ones((8, 1, 3, 3), "f4"), "dw")
    d = net.add("Conv", a, dw, group=8, strides=(2, 2), pads=(1, 1, 1, 1), sources=["dw"], name="d")
    p = net.add("MaxPool", d, kernel_shape=(2, 2), strides=(2, 2), sources=["pool"], name="p")
    s = net.add("Sigmoid", p, sources=["sigmoid"], name="s")
    t = net.add("Transpose", s, perm=(0, 2, 3, 1), sources=["turn"], name="t")
    f = net.add("Flatten", t, axis=1, sources=["flat"], name="fl")
    net.mark_output(net.add("Gemm", f, net.constant(np.ones((128, 4), "f4"), "g"), sources=["fc"], name="fc"), "y")
    return net


def reported(plan):
    plan.report.layer_ms = {layer.name: 0.1 * (i + 1) for i, layer in enumerate(plan.network.layers)}
    plan.report.candidates = {
        layer.name: [
            Candidate(c.tactic, signature(c), c.config, c.implementation, 0.1, 0.01),
            Candidate("cpu/other", signature(c), (), "other kernel", 0.15, 0.01, "50 % slower"),
            Candidate("cpu/never", "(f16:linear)->(f16:linear)", (), "", None, None, "needs AVX-512 FP16"),
        ]
        for layer in plan.network.layers
        for c in [plan.choices[layer.name]]
    }
    plan.report.cold_ms = {layer.name: [0.125, 0.175] for layer in plan.network.layers}
    plan.report.passes = PassRecord(
        ["fuse_conv_add", "fold_pads"],
        [PassFired("fuse_conv_add", "add", "Add -> %f")],
        [PassSkipped("fold_pads", "pool", "the pad has another value")],
    )
    return plan


def signature(c):
    def show(o):
        return "-" if o is None else f"{o[1]}:{o[0]}"

    return f"({','.join(map(show, c.inputs))})->({','.join(map(show, c.outputs))})"


@pytest.mark.parametrize("make", [conv_net, blocked_conv_net, fused_net])
def test_readers_of_tensorrt_json_accept_it(make):
    info = json.loads(json.dumps(engine_information(reported(make_plan(make())), "detailed"), allow_nan=False))
    check_layers(info)


@pytest.mark.parametrize("name", ["squeezenet1_1"])
def test_engines_of_the_builder_are_accepted_too(name):
    net = network_from_onnx(zoo.build(name))

    def at(n):
        return {t.name: (n, *t.shape[1:]) for t in net.inputs}

    plan = build(net, BuildConfig(optimization_level=0, timing_cache="", verify=False, profiles=((at(1), at(2), at(4)),)))
    plan = read_engine(engine_bytes(plan))
    info = engine_information(plan)
    check_layers(json.loads(json.dumps(info, allow_nan=False)))
    assert info["Layers"][0]["Inputs"][0]["Dimensions"][0] == 2  # opt shapes
    types = {layer["LayerType"] for layer in info["Layers"]}
    assert "CaskConvolution" in types
    assert "kgen" not in types
    check_profile(profile_records(Runtime().load(plan).create_context().profile({"input": np.zeros((2, 3, 224, 224), "f4")}, 2)), info)


def test_quantized_layers_show_integer_weights():
    net = Network("q", "lowered")
    x = net.add_input("x", parse_type("u8[1,4,8,8]"))
    w, b = net.constant(np.ones((8, 4, 3, 3), "i1"), "w"), net.constant(np.ones(8, "f4"), "b")
    s, z = net.constant(np.float32(0.5), "s"), net.constant(np.uint8(0), "z")
    sw, zw = net.constant(np.float32(0.5), "sw"), net.constant(np.int8(0), "zw")
    body = Network("body", "lowered")
    bx, bs, bz, bw, bsw, bzw, bb = (body.add_input(t.name, t.type) for t in (x, s, z, w, sw, zw, b))
    y = body.add("Conv", body.add("DequantizeLinear", bx, bs, bz), body.add("DequantizeLinear", bw, bsw, bzw), bb, pads=(1, 1, 1, 1))
    body.mark_output(body.add("QuantizeLinear", body.add("Relu", y), bs, bz))
    net.mark_output(net.add("Fused", x, s, z, w, sw, zw, b, composite="Conv", regions={"body": body}, sources=["conv", "relu"], name="f"), "y")
    info = engine_information(make_plan(net))
    check_layers(info)
    (conv,) = info["Layers"]
    assert (conv["Weights"], conv["Bias"]) == ({"Type": "Int8", "Count": 288}, {"Type": "Float", "Count": 8})
    assert (conv["HasReLU"], conv["HasDynamicFilter"], conv["HasSparseWeights"]) == (1, 0, 0)
    assert conv["Inputs"][0]["Format/Datatype"] == "Row major linear UInt8 format"


def one_dimensional_net():
    net = Network("audio", "lowered")
    x = net.add_input("x", parse_type("f32[2,4,100]"))
    a = net.add("Conv", x, net.constant(np.ones((8, 4, 5), "f4"), "w"), strides=(2,), pads=(2, 2), sources=["conv"], name="c")
    net.mark_output(net.add("ConvTranspose", a, net.constant(np.ones((8, 4, 4), "f4"), "u"), strides=(2,), sources=["up"], name="u"), "y")
    return net


def test_one_dimension_is_shown_as_two():
    info = engine_information(make_plan(one_dimensional_net()))
    check_layers(info)
    conv, up = info["Layers"]
    assert (conv["Kernel"], conv["Stride"], conv["PrePadding"]) == ([5, 1], [2, 1], [2, 0])
    assert conv["Outputs"][0]["Dimensions"] == [2, 8, 50, 1]
    assert up["LayerType"] == "CaskDeconvolutionV2"


def test_every_format_has_a_text_known_to_readers():
    for dtype in TYPE:
        for fmt in FORMATS_OF_WHET:
            for channels in (3, 6, 8, 16):
                if dtype != "i4":
                    assert format_words(fmt, dtype, (1, channels, 4, 4)) in FORMATS, (fmt, dtype)


def test_views_are_no_ops_without_parameters():
    net = Network("views", "lowered")
    net.mark_output(net.add("Flatten", net.add("Relu", net.add_input("x", parse_type("f32[2,3,4]")), name="r"), name="f"))
    plan = make_plan(net)
    plan.choices["f"] = dataclasses.replace(plan.choices["f"], inplace=((0, 0),))
    info = engine_information(plan)
    check_layers(info)
    assert info["Layers"][1]["LayerType"] == "NoOp"


def test_a_convolution_in_tensorrts_terms():
    info = engine_information(reported(make_plan(fused_net())))
    by_name = {layer["Name"]: layer for layer in info["Layers"]}
    conv = by_name["conv + add + relu"]
    assert conv["LayerType"] == "CaskConvolution"
    expected = {
        "Kernel": [3, 3], "PrePadding": [1, 1], "PostPadding": [1, 1], "Stride": [1, 1], "Dilation": [1, 1], "OutMaps": 8, "Groups": 1,
        "Weights": {"Type": "Float", "Count": 576}, "Bias": {"Type": "Float", "Count": 8}, "HasBias": 1, "HasReLU": 1, "HasResidual": 1,
        "HasSparseWeights": 0, "HasDynamicFilter": 0, "Activation": "RELU", "PaddingMode": "kEXPLICIT_ROUND_DOWN",
        "Metadata": "[ONNX Layer: conv]\x1e[ONNX Layer: add]\x1e[ONNX Layer: relu]",
    }  # fmt: skip
    assert {k: conv[k] for k in expected} == expected
    assert conv["Inputs"][0]["Dimensions"] == [2, 8, 16, 16]
    assert conv["FLOPs"] == 2 * 8 * 256 * (2 * 72 + 1) + 2 * 2 * 8 * 256
    assert conv["Bytes"] == 4 * (3 * 2 * 8 * 256 + 576 + 8)
    assert conv["WeightBytes"] == 4 * (576 + 8)
    assert conv["RunnerUp"] == {
        "Tactic": "cpu/other", "TacticName": "other kernel", "Formats": "(f32:linear,-,-,f32:linear)->(f32:linear)", "TimeMs": 0.15,
        "ColdWeightsMs": 0.175, "Why": "50 % slower",
    }  # fmt: skip
    assert conv["Refused"] == [{"Tactic": "cpu/never", "Formats": "(f16:linear)->(f16:linear)", "Reason": "needs AVX-512 FP16"}]
    assert [by_name[n]["LayerType"] for n in ("dw", "pool", "sigmoid", "turn", "fc")] == [
        "CudaDepthwiseConvolution", "CaskPooling", "PointWiseV2", "Shuffle", "CaskGemmMatrixMultiply",
    ]  # fmt: skip


def test_sparse_weights_are_two_of_four_along_channels():
    w = np.ones((8, 8, 3, 3), "f4")
    assert not has_two_of_four(w, 1)
    w[:, 2:4] = w[:, 6:] = 0
    assert has_two_of_four(w, 1)
    assert not has_two_of_four(w, 0)
    assert not has_two_of_four(np.zeros((8, 6), "f4"), 1)
    w[3, 2, 0, 0] = 1
    assert not has_two_of_four(w, 1)
    net = conv_net()
    net.constants["w2"].weight = type(net.constants["w2"].weight)(np.pad(np.ones((4, 2, 3, 3), "f4"), ((0, 0), (1, 1), (0, 0), (0, 0))))
    layer = next(x for x in engine_information(make_plan(net))["Layers"] if x["Name"] == "/conv2/Conv")
    assert layer["HasSparseWeights"] == 1


def test_all_profiles_are_listed_with_unique_names():
    plan, wide = make_plan(conv_net()), make_plan(conv_net(), 5, 6, 8)
    plan.profiles += wide.profiles
    plan.arenas += wide.arenas
    info = engine_information(plan)
    assert [o["Name"] for o in info["Layers"]][3:5] == ["/add/Add", "/conv1/Conv [profile 1]"]
    assert [o["Outputs"][0]["Dimensions"][0] for o in info["Layers"]] == [2] * 4 + [6] * 4
    assert info["Bindings"] == ["x", "y", "x [profile 1]", "y [profile 1]"]
    assert engine_information(plan, "layer_names_only", profile=1)["Layers"][0] == "/conv1/Conv [profile 1]"
    check_layers(engine_information(plan, profile=0))
    rows = Runtime(PlainBackend()).load(plan).create_context(1).profile({"x": np.ones((6, 3, 8, 8), "f4")}, iterations=2)
    assert [r.name for r in rows] == [o["Name"] for o in info["Layers"][4:]]


def test_names_only_and_none():
    plan = make_plan(conv_net())
    assert engine_information(plan, "layer_names_only") == {
        "Layers": ["/conv1/Conv", "/relu1/Relu", "/conv2/Conv", "/add/Add"],
        "Bindings": ["x", "y"],
    }
    assert engine_information(plan, "none") == {"Layers": [], "Bindings": ["x", "y"]}
    with pytest.raises(UsageError, match="'verbose' is none of"):
        engine_information(plan, "verbose")
    assert layer_lines(plan, "layer_names_only")[0] == "/conv1/Conv"


def test_profile_records_join_with_the_layers():
    plan = make_plan(fused_net())
    rows = Runtime(PlainBackend()).load(plan).create_context().profile({"x": np.ones((2, 8, 16, 16), "f4")}, iterations=4)
    records = profile_records(rows)
    check_profile(records, engine_information(plan))
    assert records[0] == {"count": 4}


def test_profile_values():
    assert profile_records([LayerTimes("a", "a", (1.0, 2.0, 6.0)), LayerTimes("b", "b", (1.0, 1.0, 1.0))]) == [
        {"count": 3},
        {"name": "a", "timeMs": 9.0, "averageMs": 3.0, "medianMs": 2.0, "percentage": 75.0},
        {"name": "b", "timeMs": 3.0, "averageMs": 1.0, "medianMs": 1.0, "percentage": 25.0},
    ]


def test_outputs_and_times():
    got = output_records({"y": np.array([[1.5, np.nan]], "f4"), "n": np.int64(3), "b": np.array([True])})
    assert got == [
        {"name": "y", "dimensions": "1x2", "values": [1.5, None]},
        {"name": "n", "dimensions": "scalar", "values": [3]},
        {"name": "b", "dimensions": "1", "values": [1]},
    ]
    row = dict(startEnqMs=1, endEnqMs=4, startH2dMs=0, endH2dMs=1, startComputeMs=1, endComputeMs=4, startD2hMs=4, endD2hMs=6)
    assert times_records([row])[0] | row == {**row, "h2dMs": 1, "computeMs": 3, "d2hMs": 2, "latencyMs": 6}


def test_bounds_follow_from_rates():
    plan = reported(make_plan(fused_net()))
    plan.machine |= {"peak_flops_per_s": 1e12, "bytes_per_s": 1e9}
    bounds = {f.layer.name: f.bound for f in layer_facts(plan)}
    assert bounds["s"] == "memory"
    plan.machine |= {"peak_flops_per_s": 1e6, "bytes_per_s": 1e15}
    assert {f.layer.name: f.bound for f in layer_facts(plan)}["f"] == "compute"
    plan.machine |= {"peak_flops_per_s": 1e15}
    plan.report.layer_ms["s"] = 0.001
    assert {f.layer.name: f.bound for f in layer_facts(plan)}["s"] == "launch"
    assert all(f.bound is None for f in layer_facts(make_plan(fused_net())))


def test_explain_an_engine_and_a_layer():
    plan = reported(make_plan(fused_net()))
    whole = explain(plan)
    assert whole["slowest"][0]["name"] == "fc"
    assert whole["passes_that_did_not_fire"] == ["fold_pads"]
    assert whole["skips"] == [{"pass": "fold_pads", "layer": "pool", "reason": "the pad has another value"}]
    one = explain(plan, "relu")  # a source node name finds its layer
    assert one["name"] == "conv + add + relu"
    assert one["why"] == (
        "0.1000 ms alone (0.1250 with weights out of the L2 cache), the fastest; "
        "cpu/other took 50 % more: 0.1500 ms alone (0.1750 with weights out of the L2 cache)."
    )
    assert [c["tactic"] for c in one["candidates"]] == ["cpu/numpy_reference", "cpu/other"]
    assert one["refused"][0]["reason"] == "needs AVX-512 FP16"
    assert one["passes_fired"] == [{"pass": "fuse_conv_add", "layer": "add", "what": "Add -> %f"}]
    assert explain(plan, "pool")["skips"][0]["reason"] == "the pad has another value"
    json.dumps([whole, one], allow_nan=False)
    with pytest.raises(UsageError, match=r"no layer 'sigmoyd'. Did you mean 'sigmoid'"):
        explain(plan, "sigmoyd")


def test_a_faster_runner_up_is_reported():
    plan = reported(make_plan(fused_net()))
    row = plan.report.candidates["s"]
    plan.report.cold_ms = {}  # of an engine for a CPU, or from a version without cold times
    row[1] = dataclasses.replace(row[1], ms=0.05, reason="its formats would cost reformats around it")
    why = "0.1000 ms alone; cpu/other took 0.0500 ms alone, but: its formats would cost reformats around it."
    assert explain(plan, "sigmoid")["why"] == why


def test_a_fused_layer_is_compared_with_its_parts():
    plan = reported(make_plan(fused_net()))
    row = plan.report.candidates["s"]
    plan.report.cold_ms = {}
    row[1] = dataclasses.replace(row[1], tactic="unfused", ms=0.05, reason="fused 0.0450 ms, unfused 0.0500 ms (interleaved)")
    why = "0.1000 ms alone; compared with its unfused parts: fused 0.0450 ms, unfused 0.0500 ms (interleaved)."
    assert explain(plan, "sigmoid")["why"] == why


@pytest.mark.parametrize(
    ("value", "text"),
    [(["bf16", "int8"], "bf16, int8"), ([], "none"), (None, "none"), ("", "none"), (True, "on"), (False, "off"), (0, "0"), (3, "3"), ("a", "a"),
     ([["x", 1]], "x, 1")],
)  # fmt: skip
def test_settings_are_written_for_people(value, text):
    assert format_setting(value) == text


@pytest.mark.parametrize(
    ("choice", "text"),
    [({"method": "exact, then 2 layers moved", "sum_of_layers_ms": 2.0, "kept": "k"},
      "Formats and tactics: the exact minimum of the sum of layer times, 2.0000 ms; then 2 layers moved"),
     ({"method": "lock", "sum_of_layers_ms": None}, "Formats and tactics: those of the lock"),
     ({"method": "beam", "sum_of_layers_ms": 2.0, "core_layers": 5, "engines_timed": "from the cache", "look-ahead ms": 3.0},
      "Formats and tactics: the best that the beam search found of the sum of layer times, 2.0000 ms; look-ahead search: 3.0000 ms; "
      "5 layers could not be reduced exactly; times of whole engines: from the cache")],
)  # fmt: skip
def test_the_selection_is_described_in_a_sentence(choice, text):
    assert describe_selection(choice) == text


def test_rows_and_lines_for_the_terminal():
    plan = reported(make_plan(fused_net()))
    rows = layer_rows(plan)
    assert rows[0]["runner-up"] == "other 0.1500"
    assert rows[0]["share"] == "3.6%"
    lines = layer_lines(plan, "detailed")
    assert len(lines) == 1 + len(rows)
    assert lines[1].startswith("conv + add + relu")

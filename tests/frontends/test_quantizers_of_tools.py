"""Quantizers of other tools: QONNX's in each of the three domains that tools write, against their definition in NumPy; kernels in integers;
ModelOpt's against ONNX's; refusals. Ops of TensorRT's plugins and of onnxruntime-extensions are refused with a remedy."""

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.builder import BuildConfig, build
from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.runtime import Runtime

ROUND = {"ROUND": np.round, "CEIL": np.ceil, "FLOOR": np.floor}
_rng = np.random.default_rng(3)
X = (_rng.standard_normal((2, 3, 5, 4)) * 4).astype(np.float32)


def make_model(op, inputs, domain="qonnx.custom_op.general", x=X, **attrs):
    """y = op(x, constants...); x is computed."""
    names = [f"c{i}" for i in range(len(inputs))]
    node = helper.make_node(op, ["x", *names], ["y"], name="q", domain=domain, **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(a, np.float32), n) for a, n in zip(inputs, names, strict=True)],
    )
    domains = [helper.make_opsetid(domain, 1)] if domain else []
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), *domains], ir_version=9)


def quantize(x, scale, zero, bits, signed=1, narrow=0, rounding_mode="ROUND"):
    low, high = (-(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1 - narrow)
    return (ROUND[rounding_mode](np.clip(x / scale + zero, low, high)) - zero) * scale


CHANNELS = np.float32([0.1, 0.25, 0.5]).reshape(3, 1, 1)
CASES = [
    (0.1, 0, 8, {}),
    (0.1, 0, 8, {"signed": 0}),
    (0.1, 4, 8, {"signed": 0}),
    (0.125, 3, 8, {}),
    (CHANNELS, 0, 8, {}),
    (0.1, 0, 8, {"narrow": 1}),
    (0.5, 0, 4, {}),
    (0.5, 0, 3, {"signed": 0, "narrow": 1}),
    (0.01, 0, 12, {}),
    (0.1, 0, 8, {"rounding_mode": "FLOOR"}),
    (0.1, 0, 5, {"rounding_mode": "CEIL", "signed": 0}),
    (0.3, 0.5, 6, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{np.size(c[0])}-{c[1:]}")
@pytest.mark.parametrize("domain", ["qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general"])
def test_quant(domain, case):
    scale, zero, bits, attrs = case
    scale = np.asarray(scale, np.float32)
    net = network_from_onnx(make_model("Quant", [scale, zero, bits], domain, **attrs))
    np.testing.assert_allclose(run_network(net, {"x": X})["y"], quantize(X, scale, np.float32(zero), bits, **attrs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kinds", [(np.float64, np.int64), (np.int32, np.float64)], ids=lambda k: f"{k[0].__name__}-{k[1].__name__}")
@pytest.mark.parametrize("bits", [8, 12])
def test_scales_and_zero_points_of_other_types(kinds, bits):
    """QKeras' converter writes an integer as zero point, and scales of powers of two as integers or doubles."""
    model = make_model("Quant", [1, 2, bits])
    for t, kind in zip(model.graph.initializer, kinds, strict=False):
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(kind), t.name))
    got = run_network(network_from_onnx(model), {"x": X})["y"]
    np.testing.assert_allclose(got, quantize(X, np.float32(1), np.float32(2), bits), rtol=1e-6)


def test_signs():
    for op, inputs in (("BipolarQuant", [0.5]), ("Quant", [0.5, 0, 1])):
        got = run_network(network_from_onnx(make_model(op, inputs)), {"x": np.where(X > 3, 0, X)})["y"]
        np.testing.assert_array_equal(got, np.where(np.where(X > 3, 0, X) >= 0, np.float32(0.5), np.float32(-0.5)))


def test_trunc():
    x = quantize(X, np.float32(0.125), 0, 8)
    got = run_network(network_from_onnx(make_model("Trunc", [0.125, 0, 8, 5])), {"x": x})["y"]
    np.testing.assert_allclose(got, np.floor(np.round(x / 0.125) / 8) * 0.125, rtol=1e-6)
    got = run_network(network_from_onnx(make_model("Trunc", [0.125, 0, 8, 0.5, 0, 4], rounding_mode="ROUND")), {"x": x})["y"]
    np.testing.assert_allclose(got, np.clip(np.round(np.clip(np.round(x / 0.125) / 4, -8, 7)), -8, 7) * 0.5, rtol=1e-6)


def quantized_convolutions():
    """Two convolutions with Quant at weights (4 and 8 bits, one scale per filter) and at activations (8 bits), as Brevitas exports them.

    No sum is half a step of the next scale, where rounding may differ."""
    w1, w2 = (_rng.standard_normal(s).astype(np.float32) * 0.2 for s in ((16, 3, 3, 3), (16, 16, 3, 3)))
    nodes, weights = [], [("w1", w1), ("w2", w2), ("zero", np.float32(0)), ("four", np.float32(4)), ("eight", np.float32(8))]
    weights += [("s1", np.full((16, 1, 1, 1), 0.0513, np.float32)), ("s2", np.linspace(0.004, 0.006, 16, dtype=np.float32).reshape(16, 1, 1, 1))]
    weights += [("sx", np.float32(0.0317)), ("sa", np.float32(0.0229))]

    def add(op, inputs, output, **attrs):
        domain = "qonnx.custom_op.general" if op == "Quant" else ""
        nodes.append(helper.make_node(op, inputs, [output], name=output, domain=domain, **attrs))

    add("Quant", ["x", "sx", "zero", "eight"], "xq", signed=1, narrow=0)
    add("Quant", ["w1", "s1", "zero", "four"], "w1q", signed=1, narrow=1)
    add("Quant", ["w2", "s2", "zero", "eight"], "w2q", signed=1, narrow=1)
    add("Conv", ["xq", "w1q"], "a", pads=[1, 1, 1, 1])
    add("Relu", ["a"], "r")
    add("Quant", ["r", "sa", "zero", "eight"], "rq", signed=0)
    add("Conv", ["rq", "w2q"], "y", pads=[1, 1, 1, 1])
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for n, a in weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("qonnx.custom_op.general", 1)], ir_version=9)


def test_convolutions_are_computed_in_integers():
    net = network_from_onnx(quantized_convolutions())
    plan = build(net, BuildConfig(optimization_level=1, avg_timing=1, timing_cache="", threads=1))
    types = {x.dtype.name for layer in plan.network.layers for x in layer.inputs if x is not None and not x.is_constant}
    assert types & {"i8", "u8"}
    x = _rng.standard_normal((1, 3, 16, 16)).astype(np.float32)
    with Runtime().load(plan).create_context() as context:
        got = context.run({"x": x})["y"]
    np.testing.assert_allclose(got, run_network(net, {"x": x}, widen=True)["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "why"),
    [
        ("Quant", [0.1, 0, 7.5], {}, "bit width must be one constant whole number"),
        ("Quant", [0.1, 0, 8], {"rounding_mode": "HALF_UP"}, "its rounding_mode is 'HALF_UP'"),
    ],
)
def test_refusals(op, inputs, attrs, why):
    with pytest.raises(UnsupportedError, match=why):
        network_from_onnx(make_model(op, inputs, **attrs))


def test_modelopts_float8():
    nodes = [
        helper.make_node("TRT_FP8QuantizeLinear", ["x", "s"], ["q"], name="q", domain="trt"),
        helper.make_node("TRT_FP8DequantizeLinear", ["q", "s"], ["y"], name="d", domain="trt"),
    ]
    scale = np.float32(0.05)
    net = network_from_onnx(make_trt_model(nodes, [numpy_helper.from_array(scale, "s")]))
    want = np.clip(X / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(run_network(net, {"x": X})["y"], want)


@pytest.mark.parametrize("kind", [ml_dtypes.int4, np.int8])
def test_modelopts_blocks_of_4_bits(kind):
    values, scales = _rng.integers(-8, 8, (8, 5)), _rng.random((2, 5)).astype(np.float32)
    nodes = [
        helper.make_node("TRT_INT4DequantizeLinear", ["w", "s"], ["d"], name="d", domain="trt", axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "d"], ["y"], name="y"),
    ]
    x = _rng.standard_normal((3, 8)).astype(np.float32)
    net = network_from_onnx(make_trt_model(nodes, [numpy_helper.from_array(values.astype(kind), "w"), numpy_helper.from_array(scales, "s")], (3, 8)))
    np.testing.assert_allclose(run_network(net, {"x": x})["y"], x @ (values * np.repeat(scales, 4, 0)), rtol=1e-5, atol=1e-5)


def make_trt_model(nodes, weights, shape=X.shape):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("trt", 1)], ir_version=10)


@pytest.mark.parametrize(
    ("op", "domain", "why"),
    [
        ("EfficientNMS_TRT", "TRT", "node 'q' .TRT.EfficientNMS_TRT.: a plugin of TensorRT.*or with ONNX's NonMaxSuppression"),
        ("BatchedNMSDynamic_TRT", "", "node 'q' .BatchedNMSDynamic_TRT.: a plugin of TensorRT.*or with ONNX's NonMaxSuppression"),
        ("CropAndResizePlugin_TRT", "", "a plugin of TensorRT, which only TensorRT has. Export with standard ops"),
        ("Inverse", "ai.onnx.contrib", "an op of onnxruntime-extensions .* with ONNX Runtime"),
    ],
)
def test_ops_that_only_one_runtime_has(op, domain, why):
    with pytest.raises(UnsupportedError, match=why):
        network_from_onnx(make_model(op, [], domain))

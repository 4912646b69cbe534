"""QOperator models as written by ONNX Runtime's quantizer: each op against ONNX Runtime, and refusals."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.isa import LARGEST_WEIGHT
from whet.errors import FrontendError, UnsupportedError
from whet.frontends import network_from_onnx
from whet.ops import run_network

ort = pytest.importorskip("onnxruntime")
MS = "com.microsoft"
_rng = np.random.default_rng(17)


def u8(*shape):
    return _rng.integers(0, 256, shape).astype(np.uint8)


def i8(*shape):
    return _rng.integers(-LARGEST_WEIGHT, LARGEST_WEIGHT + 1, shape).astype(np.int8)  # ONNX Runtime saturates without VNNI


def f(v):
    return np.asarray(v, np.float32)


def z(v, dtype=np.uint8):
    return np.asarray(v, dtype)


X, Y = u8(2, 6, 7, 9), u8(2, 6, 7, 9)
A, B = u8(5, 12), i8(12, 7)
SCALES = f(_rng.uniform(0.01, 0.03, 7))
# : op -> (inputs, the fed ones, attributes). Scales avoid ties, whose rounding direction is unspecified.
CASES = {
    "QLinearAdd": ([X, f(0.0207), z(7), Y, f(0.05), z(200), f(0.0613), z(120)], (0, 3), {}),
    "QLinearAdd broadcast": ([X, f(0.02), z(7), u8(6, 1, 1), f(0.05), z(200), f(0.0613), z(120)], (0, 3), {}),
    "QLinearAdd of i8": ([i8(3, 4), f(0.02), z(-7, np.int8), i8(3, 4), f(0.05), z(20, np.int8), f(0.06), z(0, np.int8)], (0, 3), {}),
    "QLinearMul": ([X, f(0.02), z(7), Y, f(0.05), z(200), f(0.1), z(120)], (0, 3), {}),
    "QLinearAveragePool": (
        [X, f(0.02), z(7), f(0.015), z(3)], (0,), {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 0)},
    ),
    "QLinearAveragePool counting padding": (
        [X, f(0.02), z(7), f(0.015), z(3)], (0,), {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "count_include_pad": 1},
    ),
    "QLinearAveragePool SAME_UPPER": ([X, f(0.02), z(7), f(0.015), z(3)], (0,), {"kernel_shape": (2, 2), "auto_pad": "SAME_UPPER"}),
    "QLinearGlobalAveragePool": ([X, f(0.02), z(7), f(0.01), z(3)], (0,), {}),
    "QLinearLeakyRelu": ([X, f(0.02), z(128), f(0.015), z(30)], (0,), {"alpha": 0.2}),
    "QLinearLeakyRelu with its own slope": ([X, f(0.02), z(128), f(0.015), z(30)], (0,), {}),
    "QLinearSigmoid": ([X, f(0.03), z(128), f(1 / 256), z(0)], (0,), {}),
    "QLinearSoftmax": ([A, f(0.03), z(128), f(1 / 256), z(0)], (0,), {"axis": -1, "opset": 13}),
    "QLinearSoftmax of opset 11": ([u8(2, 3, 4), f(0.03), z(128), f(1 / 256), z(0)], (0,), {"axis": 1, "opset": 11}),
    "QLinearConcat": ([f(0.05), z(100), X, f(0.02), z(7), Y, f(0.05), z(200)], (2, 5), {"axis": 1}),
    "QLinearWhere": ([_rng.random((2, 6, 7, 9)) < 0.5, X, f(0.02), z(7), Y, f(0.05), z(200), f(0.05), z(150)], (0, 1, 4), {}),
    "QLinearConv": (
        [X, f(0.02), z(7), i8(4, 3, 3, 3), SCALES[:4], np.zeros(4, np.int8), f(0.3), z(120), _rng.integers(-999, 999, 4).astype(np.int32)],
        (0,), {"group": 2, "pads": (1, 1, 1, 1)},
    ),
    "QLinearConv, channels last": (
        [X, f(0.02), z(7), i8(6, 3, 3, 2), SCALES[:6], np.zeros(6, np.int8), f(0.3), z(120), np.arange(-300, 300, 100, dtype=np.int32)],
        (0,), {"group": 3, "pads": (1, 1, 1, 1), "strides": (1, 2), "channels_last": 1},
    ),
    "QLinearAveragePool, channels last": (
        [X, f(0.02), z(7), f(0.015), z(3)], (0,), {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 0), "channels_last": 1},
    ),
    "QLinearGlobalAveragePool, channels last": ([X, f(0.02), z(7), f(0.01), z(3)], (0,), {"channels_last": 1}),
    "NhwcMaxPool": ([X], (0,), {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 0)}),
    "QGemm": ([A, f(0.02), z(7), B, f(0.01), z(0, np.int8), np.arange(7, dtype=np.int32) * 50, f(0.3), z(120)], (0,), {}),
    "QGemm with a scale a column": ([A, f(0.02), z(7), B, SCALES, np.zeros(7, np.int8), np.arange(7, dtype=np.int32), f(0.3), z(120)], (0,), {}),
    "QGemm flipped, floats out": ([A, f(0.02), z(7), i8(7, 12), f(0.01), z(0, np.int8), np.arange(7, dtype=np.int32) * 50], (0,), {"transB": 1}),
    "QGemm alpha": ([A, f(0.02), z(7), B, f(0.01), z(0, np.int8), np.arange(7, dtype=np.int32) * 50, f(0.3), z(120)], (0,), {"alpha": 0.5}),
    "QuantizeLinear": ([f(_rng.standard_normal((3, 5))), f(0.02), z(9)], (0,), {}),
    "DequantizeLinear": ([A, f(0.02), z(9)], (0,), {}),
}  # fmt: skip


def model_of(op, arrays, fed, attrs, domain=MS):
    names = [f"v{i}" for i in range(len(arrays))]
    node = helper.make_node(op, names, ["y"], name="n", domain=domain, **attrs)
    inputs = [helper.make_tensor_value_info(names[i], helper.np_dtype_to_tensor_dtype(arrays[i].dtype), arrays[i].shape) for i in fed]
    floats = op == "DequantizeLinear" or (op == "QGemm" and len(arrays) < 9)
    kind = TensorProto.FLOAT if floats else TensorProto.INT8 if arrays[-1].dtype == np.int8 else TensorProto.UINT8
    kept = [numpy_helper.from_array(a, names[i]) for i, a in enumerate(arrays) if i not in fed]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, None)], kept)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), {names[i]: arrays[i] for i in fed}


@pytest.mark.parametrize("case", CASES)
def test_an_op_equals_onnx_runtime(case):
    arrays, fed, attrs = CASES[case]
    model, feeds = model_of(case.split()[0].strip(","), arrays, fed, attrs)
    (want,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    net = network_from_onnx(model)
    (got,) = run_network(net, feeds).values()
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert len(np.unique(want)) > 5, "the case is not trivial"
    if want.dtype == np.float32:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    else:  # ONNX Runtime computes some of them by table or in fixed point
        off = np.abs(got.astype(int) - want.astype(int))
        assert off.max() <= 1
        assert (off > 0).mean() < 0.03


def test_the_reduced_mean_is_a_mean():
    """ONNX Runtime has no CPU kernel for it; the definition is the reference."""
    x = u8(2, 3, 8)
    model, feeds = model_of("QLinearReduceMean", [x, f(0.02), z(7), f(0.01), z(3)], (0,), {"axes": (-1,), "keepdims": 0})
    (got,) = run_network(network_from_onnx(model), feeds).values()
    mean = ((x.astype(np.float64) - 7) * 0.02).mean(axis=-1)
    assert np.abs(got - np.clip(np.rint(mean / 0.01) + 3, 0, 255)).max() <= 1


@pytest.mark.parametrize(
    ("op", "arrays", "attrs", "message"),
    [
        ("QLinearConcat", [f(0.05), z(100), X, f(0.02)], {"axis": 1}, "4 inputs, not two plus three per part"),
    ],
)
def test_refusals(op, arrays, attrs, message):
    with pytest.raises(UnsupportedError, match=message):
        network_from_onnx(model_of(op, arrays, (0,), attrs)[0])


def test_a_missing_scale_is_named():
    with pytest.raises(FrontendError, match=r"node 'n' \(com.microsoft.QLinearSigmoid\)"):
        network_from_onnx(model_of("QLinearSigmoid", [X], (0,), {})[0])


def test_other_ops_of_the_domain_stay_refused():
    with pytest.raises(UnsupportedError, match=r"com.microsoft.QOrderedAttention\): ONNX Runtime's own op"):
        network_from_onnx(model_of("QOrderedAttention", [A, B], (0,), {})[0])


def test_dynamic_quantization(tmp_path):
    """DynamicQuantizeLinear, MatMulInteger and ConvInteger, as written by quantize_dynamic."""
    tool = pytest.importorskip("onnxruntime.quantization")
    w1, w2 = f(_rng.standard_normal((4, 3, 3, 3))), f(_rng.standard_normal((4 * 36, 5)))
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"]), helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]), helper.make_node("MatMul", ["f", "w2"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 8, 8))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(w1, "w1"), numpy_helper.from_array(w2, "w2")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "f.onnx")
    tool.quantize_dynamic(str(tmp_path / "f.onnx"), str(tmp_path / "q.onnx"), weight_type=tool.QuantType.QUInt8)
    model = onnx.load(tmp_path / "q.onnx")
    assert {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"} <= {n.op_type for n in model.graph.node}
    x = f(_rng.standard_normal((1, 3, 8, 8)))
    (want,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    (got,) = run_network(network_from_onnx(model), {"x": x}).values()
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize("shapes", [((3, 4), (4,)), ((4,), (4, 5)), ((4,), (4,)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5))])
def test_products_of_integer_vectors(shapes):
    a, b = (_rng.integers(0, 256, s).astype(np.uint8) for s in shapes)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b", "za", "zb"], ["y"])], "g",
        [helper.make_tensor_value_info(n, TensorProto.UINT8, x.shape) for n, x in (("a", a), ("b", b))],
        [helper.make_tensor_value_info("y", TensorProto.INT32, None)], [numpy_helper.from_array(z(3), "za"), numpy_helper.from_array(z(9), "zb")],
    )  # fmt: skip
    (got,) = run_network(network_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])), {"a": a, "b": b}).values()
    np.testing.assert_array_equal(got, np.matmul(a.astype(int) - 3, b.astype(int) - 9))

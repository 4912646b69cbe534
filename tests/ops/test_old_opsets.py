"""Attributes and inputs of older opsets: each op's reader against ONNX Runtime on one-node models."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.errors import UnsupportedError
from whet.frontends import network_from_onnx, onnx_from_network
from whet.network import verify
from whet.ops import OPS, run_network, sample_layer

F = np.random.default_rng(7)


def f(*shape):
    return F.standard_normal(shape).astype(np.float32)


def i(*values):
    return np.array(values, np.int64)


def model(op, opset, inputs, outputs=1, fed=1, **attrs):
    """A model of one node: the first `fed` inputs are fed, the others are weights; None is absent."""
    names = ["" if a is None else f"in{k}" for k, a in enumerate(inputs)]
    infos = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in zip(names[:fed], inputs, strict=False)]
    weights = [numpy_helper.from_array(a, n) for n, a in zip(names[fed:], inputs[fed:], strict=True) if a is not None]
    outs = [f"out{k}" for k in range(outputs)]
    node = helper.make_node(op, names, outs, name="node", **attrs)
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in outs], weights)
    for o in graph.output:
        o.ClearField("type")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7), dict(zip(names[:fed], inputs, strict=False))


X4 = (1, 3, 6, 8)
CASES = {
    "clip6": ("Clip", 9, [f(3, 5)], {"min": -0.5, "max": 0.5}),
    "clip6 upper": ("Clip", 9, [f(3, 5)], {"max": 0.25}),
    "clip6 open": ("Clip", 9, [f(3, 5)], {}),
    "dropout7": ("Dropout", 9, [f(3, 5)], {"ratio": 0.3}),
    "dropout12": ("Dropout", 12, [f(3, 5), np.array(0.3, np.float32)], {}),
    "upsample9": ("Upsample", 9, [f(*X4), np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}),
    "upsample9 linear": ("Upsample", 9, [f(*X4), np.array([1, 1, 2, 2.5], np.float32)], {"mode": "linear"}),
    "resize10": ("Resize", 10, [f(*X4), np.array([1, 1, 0.5, 2], np.float32)], {"mode": "linear"}),
    "resize10 down": ("Resize", 10, [f(*X4), np.array([1, 1, 0.6, 0.8], np.float32)], {"mode": "nearest"}),
    "resize10 down and up": ("Resize", 10, [f(*X4), np.array([1, 1, 0.6, 1.5], np.float32)], {"mode": "nearest"}),
    "resize11 sizes": ("Resize", 11, [f(*X4), f(0), f(0), i(1, 3, 9, 11)],
                       {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    "resize11 scales": ("Resize", 11, [f(*X4), f(0), np.array([1, 1, 2, 2], np.float32)],
                        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    "resize13 cubic": ("Resize", 13, [f(*X4), None, np.array([1, 1, 2, 2], np.float32)], {"mode": "cubic"}),
    "slice1": ("Slice", 9, [f(4, 7)], {"starts": [1, -3], "ends": [3, 2147483647], "axes": [0, 1]}),
    "slice1 no axes": ("Slice", 9, [f(4, 7)], {"starts": [1], "ends": [-1]}),
    "slice10": ("Slice", 10, [f(4, 7), i(6), i(0), i(1), i(-2)], {}),
    "pad2": ("Pad", 9, [f(2, 5)], {"pads": [0, 1, 2, 3], "value": 1.5}),
    "pad2 reflect": ("Pad", 9, [f(3, 5)], {"pads": [0, 1, 2, 3], "mode": "reflect"}),
    "pad2 cut": ("Pad", 9, [f(3, 5)], {"pads": [0, -1, 2, 0]}),
    "mean1": ("ReduceMean", 9, [f(2, 3, 4)], {"axes": [1, -1], "keepdims": 0}),
    "mean1 all": ("ReduceMean", 12, [f(2, 3, 4)], {}),
    "max12": ("ReduceMax", 12, [f(2, 3, 4)], {"axes": [0]}),
    "sum11": ("ReduceSum", 11, [f(2, 3, 4)], {"axes": [2]}),
    "sum13": ("ReduceSum", 13, [f(2, 3, 4), i(2)], {"keepdims": 0}),
    "mean17": ("ReduceMean", 17, [f(2, 3, 4)], {"axes": [2, 1]}),
    "squeeze1": ("Squeeze", 9, [f(1, 3, 1)], {"axes": [2]}),
    "squeeze1 all": ("Squeeze", 9, [f(1, 3, 1)], {}),
    "squeeze11": ("Squeeze", 11, [f(1, 3, 1)], {"axes": [-3]}),
    "unsqueeze1": ("Unsqueeze", 9, [f(3, 4)], {"axes": [0, 3]}),
    "unsqueeze13": ("Unsqueeze", 13, [f(3, 4), i(-1)], {}),
    "split2": ("Split", 9, [f(6, 4)], {"split": [1, 5], "axis": 0}, 2),
    "split2 equal": ("Split", 9, [f(4, 6)], {"axis": 1}, 3),
    "split13 equal": ("Split", 13, [f(4, 6)], {"axis": -1}, 2),
    "split18 uneven": ("Split", 18, [f(7, 2)], {"num_outputs": 3}, 3),
    "softmax1 4d": ("Softmax", 9, [f(2, 3, 2, 4)], {"axis": 1}),
    "softmax1 default": ("Softmax", 11, [f(2, 3, 4)], {}),
    "softmax1 flat": ("Softmax", 9, [f(2, 3, 1, 1)], {"axis": 1}),
    "softmax1 last": ("Softmax", 9, [f(2, 3, 4)], {"axis": 2}),
    "softmax1 one long": ("Softmax", 9, [f(2, 1, 4)], {"axis": 1}),
    "softmax1 zero": ("Softmax", 9, [f(2, 3)], {"axis": 0}),
    "softmax13": ("Softmax", 13, [f(2, 3, 4)], {"axis": 1}),
    "log softmax1": ("LogSoftmax", 9, [f(2, 3, 4)], {"axis": 1}),
    "hardmax1": ("Hardmax", 9, [f(2, 3, 4)], {"axis": 1}),
    "topk1": ("TopK", 9, [f(3, 9)], {"k": 4}, 2),
    "topk10": ("TopK", 10, [f(9, 3), i(4)], {"axis": 0}, 2),
    "batchnorm9": ("BatchNormalization", 9, [f(2, 3, 4), f(3), f(3), f(3), np.abs(f(3))], {"epsilon": 1e-3, "momentum": 0.9}),
    "batchnorm14": ("BatchNormalization", 14, [f(2, 3, 4), f(3), f(3), f(3), np.abs(f(3))], {"training_mode": 0}),
    "gemm9": ("Gemm", 9, [f(2, 3), f(4, 3), f(4)], {"transB": 1, "alpha": 0.5}),
    "scatter9": ("Scatter", 9, [f(3, 4), np.array([[0, 2, 1, 1]]), f(1, 4)], {"axis": 0}),
    "maxpool8 upper": ("MaxPool", 8, [f(1, 2, 7, 8)], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "maxpool10 lower": ("MaxPool", 10, [f(1, 2, 7, 8)], {"kernel_shape": [2, 4], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    "maxpool10 ceil": ("MaxPool", 10, [f(1, 2, 8, 8)], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "averagepool7 upper": ("AveragePool", 7, [f(1, 2, 7, 8)], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "averagepool10 ceil": ("AveragePool", 10, [f(1, 2, 8, 8)], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "averagepool19 ceil pads": ("AveragePool", 19, [f(1, 2, 8, 8)],
                                {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    "maxpool12 indices": ("MaxPool", 12, [f(2, 3, 6, 8)], {"kernel_shape": [2, 2], "strides": [2, 2]}, 2),
    "maxpool12 padded indices": ("MaxPool", 12, [-np.abs(f(2, 3, 6, 7))], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 0]}, 2),
    "maxpool12 indices by columns": ("MaxPool", 12, [f(1, 2, 5, 7)], {"kernel_shape": [3, 3], "dilations": [2, 1], "storage_order": 1}, 2),
    "maxpool12 indices 1d": ("MaxPool", 12, [f(2, 2, 9)], {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}, 2),
    "maxpool12 indices 3d": ("MaxPool", 12, [F.integers(-9, 9, (1, 2, 4, 5, 3)).astype(np.int8)],
                             {"kernel_shape": [2, 2, 2], "auto_pad": "VALID"}, 2),
    "maxroipool": ("MaxRoiPool", 9, [f(2, 3, 10, 12), np.array([[0, 0, 0, 9, 9], [1, 1, 5, 4, 9], [1, 3, 3, 7.5, 30]], np.float32)],
                   {"pooled_shape": [4, 3], "spatial_scale": 0.7}, 1, 2),
    "einsum trace": ("Einsum", 12, [f(5, 5)], {"equation": "ii"}),
    "einsum diagonal": ("Einsum", 12, [f(2, 4, 4), f(4)], {"equation": "...ii,i->...i"}, 1, 2),
    "einsum hyperdiagonal": ("Einsum", 12, [f(3, 2, 3, 3)], {"equation": "ijii->ji"}),
    "compress": ("Compress", 11, [f(3, 4), np.array([True, False, True])], {"axis": 0}),
    "compress flat": ("Compress", 11, [f(3, 4), np.array([True, False, False, True, True])], {}),
    "compress by an input": ("Compress", 11, [f(3, 4), np.array([True, False, True])], {"axis": 0}, 1, 2),
    "nonzero of an input": ("NonZero", 13, [np.array([[1, 0, 2], [0, 0, 3]], np.float32)], {}),
    "nms": ("NonMaxSuppression", 11, [f(1, 4, 4), f(1, 1, 4), i(3)], {"center_point_box": 1}, 1, 2),
    "unique of an input": ("Unique", 11, [np.array([[3, 0, 0], [1, 0, 0], [3, 0, 0]], np.float32)], {"axis": 0}, 4),
    "nonzero": ("NonZero", 13, [np.array([[1, 0, 2], [0, 0, 3]], np.float32)], {}, 1, 0),
    "unique": ("Unique", 11, [np.array([2, 1, 1, 3, 4, 3], np.float32)], {}, 4, 0),
    "unique by occurrence": ("Unique", 11, [np.array([2, 1, 1, 3, 4, 3], np.float32)], {"sorted": 0}, 4, 0),
    "unique rows": ("Unique", 11, [np.array([[3, 0, 0], [1, 0, 0], [3, 0, 0]], np.float32)], {"axis": 0, "sorted": 0}, 4, 0),
    "conv upper": ("Conv", 9, [f(1, 2, 7, 8), f(3, 2, 3, 2)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "conv lower": ("Conv", 9, [f(1, 2, 7, 8), f(3, 2, 2, 4), f(3)], {"auto_pad": "SAME_LOWER"}),
    "conv valid": ("Conv", 9, [f(1, 2, 7, 8), f(3, 2, 3, 2)], {"strides": [2, 2], "auto_pad": "VALID"}),
    "convtranspose upper": ("ConvTranspose", 11, [f(1, 2, 5, 4), f(2, 3, 3, 3)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "convtranspose shape": ("ConvTranspose", 11, [f(1, 2, 5, 4), f(2, 3, 3, 3), f(3)], {"strides": [2, 2], "output_shape": [10, 8]}),
    "groupnorm18": ("GroupNormalization", 18, [f(2, 6, 4), f(3), f(3)], {"num_groups": 3, "epsilon": 1e-3}),
    "lstm7": ("LSTM", 7, [f(3, 2, 4), f(1, 12, 4), f(1, 12, 3), f(1, 24)], {"hidden_size": 3}, 3),
    "constant of shape": ("ConstantOfShape", 9, [i(2, 3)], {"value": numpy_helper.from_array(np.array([2], np.int32))}, 1, 0),
    "cast9": ("Cast", 9, [f(3)], {"to": TensorProto.INT32}),
    "eyelike": ("EyeLike", 9, [f(3, 4)], {"k": 1, "dtype": TensorProto.DOUBLE}),
    "quantize13": ("QuantizeLinear", 13, [f(2, 3), np.array([0.1, 0.2, 0.3], np.float32), np.array([1, 2, 3], np.int8)], {"axis": 1}),
    "gridsample16": ("GridSample", 16, [f(1, 2, 4, 5), f(1, 3, 3, 2)], {"mode": "bicubic", "padding_mode": "border"}),
    "prelu9": ("PRelu", 9, [f(1, 3, 4, 4), f(3, 1, 1)], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_old_form(case):
    op, opset, inputs, attrs, *rest = CASES[case]
    outputs, fed = (*rest, *(1, 1)[len(rest) :])
    proto, feed = model(op, opset, inputs, outputs, fed, **attrs)
    want = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    net = network_from_onnx(proto)
    verify(net)
    for where in (net, network_from_onnx(onnx_from_network(net))):
        got = run_network(where, feed)
        assert len(got) == outputs
        for a, b in zip(got.values(), want, strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=2e-5, atol=2e-6)


REFUSED = {
    "statistics": ("BatchNormalization", 9, [f(2, 3, 4), f(3), f(3), f(3), f(3)], {}, "running statistics", 5),
    "dropping": ("Dropout", 12, [f(3), np.array(0.5, np.float32), np.array(True)], {}, "evaluation mode"),
    "random": ("RandomNormalLike", 13, [f(3)], {}, "random numbers"),
    "reshape": ("Reshape", 13, [f(6), i(2, 3)], {}, "computed from data at run time", 1, 2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    op, opset, inputs, attrs, text, *rest = REFUSED[case]
    outputs, fed = (*rest, *(1, 1)[len(rest) :])
    proto, _ = model(op, opset, inputs, outputs, fed, **attrs)
    with pytest.raises(UnsupportedError, match="node") as e:
        network_from_onnx(proto)
    assert text in str(e.value)


def test_mask_of_dropout_is_true():
    proto, feed = model("Dropout", 12, [f(3, 5)], 2)
    got = run_network(network_from_onnx(proto), feed)
    np.testing.assert_array_equal(got["out0"], feed["in0"])
    assert got["out1"].all()
    assert got["out1"].shape == (3, 5)
    assert got["out1"].dtype == bool


def test_models_before_opset_9_are_converted():
    """PRelu's slopes belonged to channels, and Upsample had its scales as an attribute."""
    proto, feed = model("PRelu", 6, [f(2, 3, 4, 4), f(3)])
    x, slope = feed["in0"], numpy_helper.to_array(proto.graph.initializer[0])
    (got,) = run_network(network_from_onnx(proto), feed).values()
    np.testing.assert_allclose(got, np.where(x < 0, x * slope.reshape(3, 1, 1), x))
    proto, feed = model("Upsample", 7, [f(1, 2, 3, 4)], scales=[1.0, 1.0, 2.0, 3.0], mode="nearest")
    (got,) = run_network(network_from_onnx(proto), feed).values()
    np.testing.assert_array_equal(got, feed["in0"].repeat(2, 2).repeat(3, 3))


@pytest.mark.parametrize("known", [True, False])
def test_if(known):
    """A known condition keeps only the branch's layers; an unknown one keeps both branches as regions."""
    branches = {}
    for key, op in (("then_branch", "Neg"), ("else_branch", "Abs")):
        out = helper.make_tensor_value_info(f"{key}_out", TensorProto.FLOAT, [4])
        branches[key] = helper.make_graph([helper.make_node(op, ["x"], [f"{key}_out"])], key, [], [out])
    nodes = [helper.make_node("If", ["c"], ["y"], name="if", **branches)]
    x, c = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    weights = [numpy_helper.from_array(np.array(True), "c")] if known else []
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph(nodes, "g", [x] if known else [x, c], [y], weights)
    net = network_from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [layer.op for layer in net.layers] == (["Neg"] if known else ["If"])
    v = f(4)
    np.testing.assert_array_equal(run_network(net, {"x": v} if known else {"x": v, "c": np.array(True)})["y"], -v)
    if not known:
        np.testing.assert_array_equal(run_network(net, {"x": v, "c": np.array(False)})["y"], np.abs(v))


@pytest.mark.parametrize("name", ["ReduceMean", "ReduceMax", "ReduceSum", "Split", "Softmax", "Clip", "Pad", "Resize", "Squeeze", "TopK"])
@pytest.mark.parametrize("opset", [13, 17])
def test_written_in_an_older_opset(name, opset):
    """The writer's older forms: ONNX Runtime computes the same from them, or they are refused with the required opset."""
    ran = 0
    for sample in OPS[name].samples:
        net, layer, arrays = sample_layer(name, sample)
        if any(t.dtype.name not in ("f32", "i64") for t in net.inputs):
            continue
        try:
            proto = onnx_from_network(net, opset)
        except UnsupportedError as e:
            refused = str(e)
            assert "newer" in refused
            continue
        feed = {t.name: a for t, a in zip(layer.inputs, arrays, strict=True) if t in net.inputs}
        want = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        for a, b in zip(run_network(net, feed).values(), want, strict=True):
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=2e-5, atol=2e-6)
        ran += 1
    assert ran > 2

"""Weight standardization: the standardized weights are constants of the network, whose channels can be cut."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.pruning import cut, groups, zero_channels


def model(*, of_input=False):
    """Two convolutions whose weights are standardized per output channel, as timm's ScaledStdConv2d is exported. `of_input`: from an input."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (24, 3, 7, 7), "w2": (16, 24, 3, 3), "w3": (4, 16, 1, 1), "g1": (24, 1), "g2": (16, 1)}  # smaller results are folded anyway
    weights = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
    nodes, stored = [], [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items() if not (of_input and n == "w1")]
    for n, x, y, shape in ((1, "x", "a", shapes["w1"]), (2, "b", "c", shapes["w2"])):
        stored += [numpy_helper.from_array(np.array(s, np.int64), f"{k}{n}") for k, s in (("flat", (shape[0], -1)), ("shape", shape))]
        nodes += [
            helper.make_node("Reshape", [f"w{n}", f"flat{n}"], [f"f{n}"]),
            helper.make_node("ReduceMean", [f"f{n}"], [f"m{n}"], axes=[1]),
            helper.make_node("Sub", [f"f{n}", f"m{n}"], [f"d{n}"]),
            helper.make_node("Mul", [f"d{n}", f"d{n}"], [f"q{n}"]),
            helper.make_node("ReduceMean", [f"q{n}"], [f"v{n}"], axes=[1]),
            helper.make_node("Sqrt", [f"v{n}"], [f"s{n}"]),
            helper.make_node("Div", [f"d{n}", f"s{n}"], [f"e{n}"]),
            helper.make_node("Mul", [f"e{n}", f"g{n}"], [f"h{n}"]),
            helper.make_node("Reshape", [f"h{n}", f"shape{n}"], [f"k{n}"]),
            helper.make_node("Conv", [x, f"k{n}"], [y], name=f"conv{n}"),
            helper.make_node("Relu", [y], [chr(ord(y) + 1)]),
        ]
    nodes.append(helper.make_node("Conv", ["d", "w3"], ["y"], name="conv3"))
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, 12, 12])]
    inputs += [helper.make_tensor_value_info("w1", onnx.TensorProto.FLOAT, shapes["w1"])] if of_input else []
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_standardized_weights_are_stored_and_cut():
    session = pytest.importorskip("onnxruntime").InferenceSession(model().SerializeToString())
    x = {"x": np.random.default_rng(1).standard_normal((2, 3, 12, 12)).astype(np.float32)}
    net = network_from_onnx(model())
    assert [layer.op for layer in net.layers] == ["Conv", "Relu", "Conv", "Relu", "Conv"]
    assert set(net.constants) == {"conv1.1", "conv2.1", "w3"}
    np.testing.assert_allclose(run_network(net, x)["y"], session.run(None, x)[0], rtol=1e-4, atol=1e-4)
    assert [g.name for g in groups(net)] == ["conv1.1", "conv2.1"]
    kept = {"conv1.1": np.arange(9), "conv2.1": np.arange(5)}
    np.testing.assert_allclose(run_network(cut(net, kept), x)["y"], run_network(zero_channels(net, kept), x)["y"], rtol=1e-4, atol=1e-4)


def test_weights_that_depend_on_an_input_stay_computed():
    net = network_from_onnx(model(of_input=True))
    assert sum(layer.op == "ReduceMean" for layer in net.layers) == 2
    assert "conv2.1" in net.constants

"""Equal vectors that an exporter has merged: each reader gets its own, so that layers are cut and trained independently."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from whet.frontends import network_from_onnx, onnx_from_network
from whet.ops import run_network
from whet.pruning import cut, groups


def model(scale):
    """Two convolutions with batch norms that share all four vectors."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": 0.3 * rng.standard_normal((8, 3, 3, 3)),
        "w2": 0.3 * rng.standard_normal((8, 8, 3, 3)),
        "w3": 0.3 * rng.standard_normal((4, 8, 1, 1)),
        "scale": scale,
        "zeros": np.zeros(8),
        "ones": np.ones(8),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="conv1"),
        helper.make_node("BatchNormalization", ["a", "scale", "zeros", "zeros", "ones"], ["b"], name="bn1"),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("Conv", ["c", "w2"], ["d"], name="conv2"),
        helper.make_node("BatchNormalization", ["d", "scale", "zeros", "zeros", "ones"], ["e"], name="bn2"),
        helper.make_node("Relu", ["e"], ["f"]),
        helper.make_node("Conv", ["f", "w3"], ["y"], name="conv3"),
    ]
    shape = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", shape, ["N", 3, 8, 8])], [helper.make_tensor_value_info("y", shape, None)],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_merged_vectors_do_not_couple_layers():
    net = network_from_onnx(model(np.ones(8)))
    found = {g.name: g for g in groups(net)}
    assert set(found) == {"w1", "w2"}
    assert {n for n in found["w1"].layers if n.startswith(("conv", "bn"))} == {"conv1", "bn1", "conv2"}
    assert {n for n in found["w2"].layers if n.startswith(("conv", "bn"))} == {"conv2", "bn2", "conv3"}
    small = cut(net, {"w1": np.arange(4)})
    assert small.tensor("w2").shape == (8, 4, 3, 3)
    x = {"x": np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    again = network_from_onnx(onnx_from_network(net))
    np.testing.assert_array_equal(run_network(again, x)["y"], run_network(net, x)["y"])
    assert net.constants["bn2.1"].weight is net.constants["scale"].weight  # stored once


@pytest.mark.parametrize("scale", [np.arange(8.0)])
def test_vectors_with_different_values_stay_tied(scale):
    net = network_from_onnx(model(scale))
    assert [n for n in net.constants if n.startswith("bn2")] == ["bn2.2", "bn2.3", "bn2.4"]  # the scale is still shared
    assert len(groups(net)) == 1

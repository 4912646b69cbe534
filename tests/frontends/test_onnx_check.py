"""check_onnx: the report lists everything that is unsupported, and separates causes from consequences."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.errors import FrontendError
from whet.frontends import check_onnx
from whet.ops import OPS


@pytest.fixture(autouse=True)
def _det_is_unknown(monkeypatch):
    """An op with ONNX type inference that whet does not support."""
    monkeypatch.delitem(OPS, "Det", raising=False)


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def mixed():
    """Supported and unsupported nodes: Det has a type by shape inference, the foreign op has none."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Det", ["a"], ["d"], name="det"),
        helper.make_node("Sigmoid", ["d"], ["s"], name="sigmoid"),
        helper.make_node("Thing", ["a"], ["t"], name="thing", domain="acme"),
        helper.make_node("Tanh", ["t"], ["u"], name="tanh"),
        helper.make_node("Add", ["a", "w"], ["y"], name="add"),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [value("x", ["N", 3, 3])],
        [value("y", ["N", 3, 3]), value("s", ["N"]), value("u", None)],
        [numpy_helper.from_array(np.ones((3, 3), np.float32), "w")],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)], ir_version=9, producer_name="me"
    )


def test_every_failing_node_is_listed():
    report = check_onnx(mixed())
    assert not report.supported
    assert [(p.node, p.op, p.reached) for p in report.problems] == [
        ("det", "Det", True),
        ("thing", "acme.Thing", True),
        ("tanh", "Tanh", False),
    ]
    assert "whet has no such op" in report.problems[0].reason
    assert "node 'thing', which is not supported" in report.problems[2].reason
    assert report.unsupported_ops() == {"Det": 1, "acme.Thing": 1}


def test_the_report_describes_the_model():
    report = check_onnx(mixed())
    assert (report.opset, report.nodes, report.parameters, report.producer) == (17, 6, 9, "me")
    assert report.inputs == {"x": "f32[N,3,3]"}
    assert report.ops == {"Relu": 1, "Det": 1, "Sigmoid": 1, "acme.Thing": 1, "Tanh": 1, "Add": 1}
    data = json.loads(json.dumps(report.to_json()))
    assert data["supported"] is False
    assert data["problems"][0]["node"] == "det"
    text = str(report)
    assert "not supported: node 'det' (Det)" in text
    assert "3 of 6 nodes cannot be read" in text


def test_a_supported_model():
    m = mixed()
    kept = [n for n in m.graph.node if n.name in ("relu", "add")]
    del m.graph.node[:]
    m.graph.node.extend(kept)
    del m.graph.output[1:]
    report = check_onnx(m, shapes={"x": (2, None, None)})
    assert report.supported
    assert report.layers == 2
    assert report.inputs == {"x": "f32[2,3,3]"}
    assert report.outputs == {"y": "f32[2,3,3]"}
    assert "every node is supported" in str(report)


def test_an_invalid_file_has_no_report():
    with pytest.raises(FrontendError, match="not an ONNX model"):
        check_onnx(b"rubbish")


def test_stand_ins_are_removed():
    """Two failing nodes with one output name each get a placeholder each, and names of inputs stay free for users."""
    nodes = [helper.make_node("Det", [v], [f"{v}_unread"], name=v) for v in ("x", "z")]
    graph = helper.make_graph(nodes, "g", [value("x", [2, 2]), value("z", [2, 2])], [value("x_unread", [])])
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(m)
    assert [p.node for p in check_onnx(m).problems] == ["x", "z"]


def test_the_report_survives_an_abort_of_shape_inference():
    """onnx's C++ shape inference aborts the process on this Slice of an axis of negative size: the report must survive it."""
    ints = {k: numpy_helper.from_array(np.array([v], np.int64), k) for k, v in (("from", 0), ("to", 1), ("axes", 0))}
    nodes = [helper.make_node("Det", ["x"], ["d"], name="det"), helper.make_node("Slice", ["z", "from", "to", "axes"], ["y"], name="slice")]
    graph = helper.make_graph(nodes, "g", [value("x", [2, 2]), value("z", [-5])], [value("y", None), value("d", None)], list(ints.values()))
    report = check_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    assert [p.node for p in report.problems] == ["det"]


def test_nodes_of_functions_are_counted_where_they_fail():
    """A function of three nodes that cannot be read, called twice from a graph of three nodes: six of nine, not six of three."""
    body = [helper.make_node("Thing", ["a" if k == 0 else f"t{k}"], [f"t{k + 1}" if k < 2 else "b"], domain="acme") for k in range(3)]
    function = helper.make_function("acme", "Three", ["a"], ["b"], body, [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)])
    calls = [helper.make_node("Three", [a], [b], name=n, domain="acme") for n, a, b in (("one", "x", "m"), ("two", "x", "n"))]
    graph = helper.make_graph(
        [*calls, helper.make_node("Relu", ["x"], ["y"], name="relu")], "g", [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_tensor_value_info(n, 1, [2]) for n in ("m", "n", "y")],
    )  # fmt: skip
    model = helper.make_model(graph, functions=[function], opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)], ir_version=9)
    report = check_onnx(model)
    assert (report.nodes, report.tried, len(report.problems)) == (3, 9, 6)
    assert "6 of 9 nodes (with those of functions and subgraphs) cannot be read" in str(report)

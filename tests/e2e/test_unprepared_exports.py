"""Classes of models that exporters write and that once could not be built: each is built, saved, loaded and run."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from whet.builder import BuildConfig, build
from whet.engine import engine_bytes, read_engine
from whet.frontends import check_onnx, network_from_onnx
from whet.runtime import Runtime

F = TensorProto.FLOAT


def model(nodes, inputs, outputs, weights=(), opset=17):
    """A ModelProto; inputs and outputs are (name, element type, shape), weights (name, array)."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def config(**options):
    return BuildConfig(**{"optimization_level": 1, "avg_timing": 1, "timing_cache": "", "threads": 1, **options})


def run_saved(net, feeds, **options):
    """Outputs of the engine after it was written and read again."""
    plan = read_engine(engine_bytes(build(net, config(**options))))
    with Runtime().load(plan).create_context() as context:
        return context.run(feeds)


def onnxruntime_outputs(proto, feeds):
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def test_a_layer_called_like_an_output():
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], name="first", perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["a", "w"], ["b"], name="y"),
        helper.make_node("Transpose", ["b"], ["y"], name="last", perm=[0, 2, 3, 1]),
    ]
    w = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype("f4")
    proto = model(nodes, [("x", F, [1, 8, 8, 3])], [("y", F, [1, 6, 6, 4])], [("w", w)])
    feeds = {"x": np.random.default_rng(1).standard_normal((1, 8, 8, 3)).astype("f4")}
    got = run_saved(network_from_onnx(proto), feeds)
    np.testing.assert_allclose(got["y"], onnxruntime_outputs(proto, feeds)["y"], rtol=1e-4, atol=1e-5)


def test_a_constant_sliced_by_a_symbolic_length():
    """Position ids of CLIP's text model: position_ids[:, :S], then a lookup in the table of positions."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"], axis=0),
        helper.make_node("Unsqueeze", ["length", "zero"], ["end"]),
        helper.make_node("Slice", ["ids", "zero", "end", "axes"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["embedded"]),
        helper.make_node("Add", ["x", "embedded"], ["y"]),
    ]
    table = np.random.default_rng(0).standard_normal((16, 8)).astype("f4")
    weights = [
        ("ids", np.arange(16)[None]),
        ("table", table),
        ("one", np.array(1)),
        ("zero", np.array([0])),
        ("axes", np.array([1])),
    ]
    proto = model(nodes, [("x", F, ["N", "S", 8])], [("y", F, ["N", "S", 8])], weights)
    assert check_onnx(proto.SerializeToString()).supported
    net = network_from_onnx(proto)
    shapes = tuple({"x": (1, s, 8)} for s in (2, 5, 16))
    plan = read_engine(engine_bytes(build(net, config(profiles=(shapes,)))))
    with Runtime().load(plan).create_context() as context:
        for length in (2, 7, 16):
            x = np.random.default_rng(length).standard_normal((1, length, 8)).astype("f4")
            np.testing.assert_allclose(context.run({"x": x})["y"], x + table[None, :length], rtol=1e-6)

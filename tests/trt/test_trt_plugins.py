"""IPluginV3 as TensorRT's samples write it: a creator in the registry, nodes of ONNX models and add_plugin_v3, on host memory."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import whet.trt as trt
from support.trt_plugin import NAME, CircPad, CircPadCreator
from whet.errors import UnsupportedError
from whet.runtime.memory import make_array_at
from whet.trt.plugins import IDimensionExpr, IExprBuilder

PADS = (1, 1, 2, 0)


@pytest.fixture(scope="module")
def creator():
    """The sample's creator, registered once in this process."""
    found = trt.get_plugin_registry().get_creator(NAME, "1", "")
    if found is None:
        found = CircPadCreator()
        assert trt.get_plugin_registry().register_creator(found, "")
    return found


def model(domain="", **attributes):
    """ReLU, then the plugin, of a batch of dynamic size."""
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node(NAME, ["r"], ["y"], name="pad", domain=domain, **attributes)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["N", 3, 4, 5]), ("y", ["N", 3, "h", "w"])))
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets, ir_version=10).SerializeToString()


def expected(x):
    return np.pad(np.maximum(x, 0), ((0, 0), (0, 0), PADS[:2], PADS[2:]), mode="wrap")


def run(engine, x, shape):
    context, y = engine.create_execution_context(), np.zeros(shape, np.float32)
    name_in, name_out = engine[0], engine[1]
    assert context.set_input_shape(name_in, x.shape)
    assert context.get_tensor_shape(name_out) == shape
    context.set_tensor_address(name_in, x.ctypes.data)
    context.set_tensor_address(name_out, y.ctypes.data)
    assert context.execute_async_v3(0)
    return y


@pytest.fixture(scope="module")
def engine(creator):
    logger = trt.Logger()
    builder = trt.Builder(logger)
    parser = trt.OnnxParser(builder.create_network(), logger)
    assert parser.parse(model(pads=PADS, plugin_version="1", plugin_namespace="")), parser.get_error(0)
    assert parser.network.get_output(0).shape == (-1, 3, 6, 7)
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 3, 4, 5), (2, 3, 4, 5), (4, 3, 4, 5))
    config.add_optimization_profile(profile)
    return trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(parser.network, config))


def test_a_node_of_a_model_runs_the_plugin_and_the_engine_names_it(engine):
    for n in (2, 3):
        x = np.random.default_rng(n).standard_normal((n, 3, 4, 5)).astype(np.float32)
        np.testing.assert_array_equal(run(engine, x, (n, 3, 6, 7)), expected(x))
    plan = engine.engine.plan
    assert plan.plugins == {NAME: "1"}


def test_every_valid_tactic_is_timed(engine):
    plan = engine.engine.plan
    timed = {(c.tactic, tuple(c.config)) for layer, rows in plan.report.candidates.items() if "pad" in layer for c in rows}
    assert {dict(config)["tactic"] for tactic, config in timed if tactic == f"cpu/{NAME}.enqueue"} == {1, 2}


def test_networks_built_by_hand_take_plugins(creator):
    logger = trt.Logger()
    builder = trt.Builder(logger)
    network = builder.create_network()
    x = network.add_input("x", trt.float32, (1, 3, 4, 5))
    fields = trt.PluginFieldCollection([trt.PluginField("pads", np.array(PADS, np.int32), trt.PluginFieldType.INT32)])
    plugin = creator.create_plugin("pad", fields, trt.TensorRTPhase.BUILD)
    layer = network.add_plugin_v3([network.add_activation(x, trt.ActivationType.RELU).get_output(0)], [], plugin)
    assert layer.type == trt.LayerType.PLUGIN_V3
    assert layer.plugin is plugin
    layer.get_output(0).name = "y"
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    engine = trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
    values = np.random.default_rng(0).standard_normal((1, 3, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(run(engine, values, (1, 3, 6, 7)), expected(values))
    with pytest.raises(trt.NotServedError, match="shape_inputs"):
        network.add_plugin_v3([x], [x], plugin)


def test_nodes_in_other_domains_and_without_a_creator(creator):
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    for domain, fits in (("trt.plugins", True), ("tensorrt", True), ("com.other", False)):
        parser = trt.OnnxParser(trt.Builder(logger).create_network(), logger)
        assert parser.parse(model(domain, pads=PADS)) == fits
    parser = trt.OnnxParser(trt.Builder(logger).create_network(), logger)
    assert not parser.parse(model(pad=PADS))
    assert "has no attribute pad; it has pads" in parser.get_error(0).desc()


def test_formats_and_types_that_a_plugin_refuses_are_named(creator):
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    graph = onnx.load_from_string(model(pads=PADS))
    for value in (*graph.graph.input, *graph.graph.output):
        value.type.tensor_type.elem_type = TensorProto.INT32
    parser = trt.OnnxParser(trt.Builder(logger).create_network(), logger)
    assert not parser.parse(graph.SerializeToString())
    assert "'pad' does not take input 0 as DataType.INT32 row-major (LINEAR)" in parser.get_error(0).desc()


def test_a_plugin_that_fails_is_named(creator, monkeypatch):
    from whet.errors import BackendError
    from whet.network import Network, parse_type
    from whet.ops import run_network

    def fails(*_):
        raise ZeroDivisionError("no pads")

    net = Network("n")
    net.mark_output(net.add(f"tensorrt.{NAME}", net.add_input("x", parse_type("f32[1,3,4,5]")), pads=PADS), "y")
    monkeypatch.setattr(CircPad, "enqueue", fails)
    with pytest.raises(BackendError, match=r"CircPadPlugin '.*': enqueue failed: ZeroDivisionError: no pads"):
        run_network(net, {"x": np.zeros((1, 3, 4, 5), np.float32)})


def test_the_registry_keeps_one_version_of_a_name(creator):
    registry = trt.get_plugin_registry()
    assert not registry.register_creator(CircPadCreator(), "")
    assert registry.get_creator(NAME, "1", "") is creator
    assert registry.get_creator(NAME, "2", "") is None
    assert creator in registry.all_creators
    assert trt.Builder(trt.Logger()).get_plugin_registry() is registry


def test_sizes_are_computed_symbolically():
    build, n = IExprBuilder(), trt.DimsExprs(2)[0]
    assert n.is_constant()
    from whet.network import make_symbol

    batch, three = IDimensionExpr(make_symbol("N")), build.constant(3)
    ops = trt.DimensionOperation
    assert not batch.is_constant()
    assert [str(build.operation(op, batch, three).dim) for op in (ops.SUM, ops.PROD, ops.SUB)] == ["N+3", "3*N", "N-3"]
    assert [build.operation(op, build.constant(7), three).get_constant_value() for op in ops] == [10, 21, 7, 3, 4, 0, 0, 2, 3]
    with pytest.raises(UnsupportedError, match="comparisons take known sizes"):
        build.operation(ops.LESS, batch, three)
    with pytest.raises(UnsupportedError, match="not constant"):
        batch.get_constant_value()


def test_fields_hold_arrays_and_text():
    assert trt.PluginField("mode", "wrap", trt.PluginFieldType.CHAR).data.tobytes() == b"wrap"
    assert trt.PluginField("n", np.array([1, 2])).size == 2
    assert make_array_at(trt.PluginField("n", np.array([5], np.int32)).data.ctypes.data, (1,), np.dtype(np.int32))[0] == 5

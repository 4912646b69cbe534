"""The TensorRT-shaped API: builds, runs and refusals."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import whet.trt as trt

ROOT = Path(__file__).parents[2]

# TensorRT's classes and functions, from the bindings of 10.16 and 11.1
NAMES = """Builder BuilderFlag CalibrationAlgoType DataType DeviceType Dims EngineCapability EngineInspector ExecutionContextAllocationStrategy
HardwareCompatibilityLevel IAlgorithmSelector IBuilderConfig ICudaEngine IDebugListener IErrorRecorder IExecutionContext IGpuAllocator
IGpuAsyncAllocator IHostMemory IIfConditional IInt8Calibrator IInt8EntropyCalibrator IInt8EntropyCalibrator2 IInt8LegacyCalibrator
IInt8MinMaxCalibrator ILayer ILogger ILoop INetworkDefinition IOptimizationProfile IOutputAllocator IPluginCreatorV3One IPluginV2 IPluginV3
IProfiler IProgressMonitor IStreamReader IStreamReaderV2 IStreamWriter ITensor ITimingCache LayerInformationFormat LayerType Logger
MemoryPoolType NetworkDefinitionCreationFlag OnnxParser OnnxParserFlag OnnxParserRefitter PreviewFeature ProfilingVerbosity QuantizationFlag
Refitter Runtime RuntimePlatform TacticSource TensorFormat TensorIOMode TensorLocation TilingOptimizationLevel get_plugin_registry
init_libnvinfer_plugins nptype volume""".split()


class Messages(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.errors = []

    def log(self, severity, msg):
        if severity <= trt.ILogger.ERROR:
            self.errors.append(msg)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """conv and ReLU of a batch of dynamic size; the path and the weights."""
    w = np.random.default_rng(0).standard_normal((8, 3, 1, 1)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], name="conv"), helper.make_node("Relu", ["c"], ["y"], name="relu")]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, 8, 8]) for n, c in (("x", 3), ("y", 8)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w")])
    path = tmp_path_factory.mktemp("trt") / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path, w


@pytest.fixture(scope="module")
def engine(model):
    """The model built and loaded with a profile of batches from 1 to 4."""
    builder = trt.Builder(trt.Logger())
    parser = trt.OnnxParser(builder.create_network(), trt.Logger())
    assert parser.parse_from_file(model[0])
    assert parser.network.get_input(0).shape == (-1, 3, 8, 8)
    assert [layer.type.name for layer in parser.network] == ["CONVOLUTION", "ACTIVATION"]
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
    assert config.add_optimization_profile(profile) == 0
    data = builder.build_serialized_network(parser.network, config)
    return trt.Runtime(trt.Logger()).deserialize_cuda_engine(data)


def expected(x, w):
    return np.maximum(np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]), 0)


def test_runs_on_addresses(engine, model):
    context = engine.create_execution_context()
    x = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    y = np.zeros((3, 8, 8, 8), np.float32)
    assert not context.set_input_shape("x", (5, 3, 8, 8))
    assert context.set_input_shape("x", x.shape)
    assert context.get_tensor_shape("y") == y.shape
    assert not context.execute_async_v3(0)
    assert context.set_tensor_address("x", x.ctypes.data)
    assert context.set_tensor_address("y", y.ctypes.data)
    assert context.execute_async_v3(0)
    np.testing.assert_allclose(y, expected(x, model[1]), rtol=1e-4, atol=1e-5)
    y[:] = 0
    assert context.execute_v2([x.ctypes.data, y.ctypes.data])
    np.testing.assert_allclose(y, expected(x, model[1]), rtol=1e-4, atol=1e-5)


def test_output_allocators_get_size_and_shape(engine, model):
    class Allocator(trt.IOutputAllocator):
        def reallocate_output_async(self, tensor_name, memory, size, alignment, stream):
            self.buffer = np.zeros(size, np.uint8)
            return self.buffer.ctypes.data

        def notify_shape(self, tensor_name, shape):
            self.shape = tuple(shape)

    context, allocator = engine.create_execution_context(), Allocator()
    x = np.ones((1, 3, 8, 8), np.float32)
    context.set_input_shape("x", x.shape)
    context.set_tensor_address("x", x.ctypes.data)
    assert context.set_output_allocator("y", allocator)
    assert context.execute_async_v3(0)
    np.testing.assert_allclose(allocator.buffer.view(np.float32).reshape(allocator.shape), expected(x, model[1]), rtol=1e-4, atol=1e-5)


def test_an_engine_describes_itself(engine):
    assert [(engine.get_tensor_name(i), engine.get_tensor_mode(engine.get_tensor_name(i)).name) for i in range(engine.num_io_tensors)] == [
        ("x", "INPUT"), ("y", "OUTPUT"),
    ]  # fmt: skip
    assert engine.get_tensor_shape("x") == (-1, 3, 8, 8)
    assert engine.get_tensor_profile_shape("x", 0) == [(1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8)]
    assert engine.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    with engine.serialize() as data:  # a context manager, as Polygraphy's `convert` uses it
        assert data.nbytes == len(data)
    assert '"Layers"' in engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)


def test_networks_are_built_by_hand():
    builder = trt.Builder(trt.Logger())
    net = builder.create_network()
    x = net.add_input("x", trt.float32, (2, 3))
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    weights = net.add_constant(w.shape, w).get_output(0)
    y = net.add_matrix_multiply(x, trt.MatrixOperation.NONE, weights, trt.MatrixOperation.TRANSPOSE).get_output(0)
    y = net.add_elementwise(y, y, trt.ElementWiseOperation.SUM).get_output(0)
    y = net.add_activation(net.add_unary(y, trt.UnaryOperation.NEG).get_output(0), trt.ActivationType.RELU).get_output(0)
    net.mark_output(y)
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    context = builder.build_engine_with_config(net, config).create_execution_context()
    a, out = -np.ones((2, 3), np.float32), np.zeros((2, 4), np.float32)
    assert context.execute_v2([a.ctypes.data, out.ctypes.data])
    np.testing.assert_allclose(out, -2 * a @ w.T)
    with pytest.raises(trt.NotServedError, match="add_loop"):
        net.add_loop()


def test_parse_errors_are_kept_and_logged():
    logger = Messages()
    parser = trt.OnnxParser(trt.Builder(logger).create_network(), logger)
    assert not parser.parse(b"not a model")
    assert parser.num_errors == 1
    assert logger.errors == [str(parser.get_error(0))]
    assert trt.Runtime(logger).deserialize_cuda_engine(b"not an engine") is None


def parsed(text):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString()


PARTLY_SUPPORTED = """g (float[2,3] x) => (float[2,3] y) {
    a = Relu(x)  b = Unknown(a)  c = Relu(b)  d = Exp(c)
    e = If (t) <then_branch = th () => (float[2,3] p) { p = Other(x) }, else_branch = el () => (float[2,3] q) { q = Relu(x) }>
    y = Add(d, e)
}""".replace("(float[2,3] x)", "(float[2,3] x, bool t)", 1)


def test_the_parser_says_which_nodes_it_reads():
    """Nodes that only follow from unsupported ones count as supported; a node of a branch counts as the If."""
    logger = Messages()
    parser = trt.OnnxParser(trt.Builder(logger).create_network(), logger)
    groups = [([0], True), ([1], False), ([2, 3], True), ([4], False), ([5], True)]
    assert parser.supports_model(parsed(PARTLY_SUPPORTED)) == (False, groups)
    assert [(parser.get_subgraph_nodes(i), parser.is_subgraph_supported(i)) for i in range(parser.num_subgraphs)] == groups
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    assert [(e.node(), e.node_operator(), e.code()) for e in errors] == [
        (1, "Unknown", trt.ErrorCode.UNSUPPORTED_NODE), (4, "Other", trt.ErrorCode.UNSUPPORTED_NODE),
    ]  # fmt: skip
    assert [str(e) for e in errors] == logger.errors
    parser.clear_errors()
    assert not parser.parse(parsed(PARTLY_SUPPORTED))
    assert [parser.get_error(i).node() for i in range(parser.num_errors)] == [1, 4]
    assert parser.supports_model_v2(parsed("g (float[2] x) => (float[2] y) { y = Relu(x) }"))
    assert (parser.num_subgraphs, parser.get_subgraph_nodes(0), parser.is_subgraph_supported(0)) == (1, [0], True)
    assert not parser.supports_model_v2(parsed("g (float[2] x) => (float[2] y) { a = Unknown(x)  y = Other(a) }"))
    assert parser.num_subgraphs == 0, "nothing is left to divide"
    assert [parser.supports_operator(op) for op in ("Conv", "MeanVarianceNormalization", "Unknown")] == [True, True, False]


def test_the_types_of_inputs_and_outputs_can_be_set():
    net = trt.Builder(trt.Logger()).create_network()
    relu = net.add_activation(net.add_input("x", trt.float32, (2, 3)), trt.ActivationType.RELU)
    y = relu.get_output(0)
    y.name = "y"
    net.mark_output(y)
    with pytest.raises(trt.NotServedError, match="inner tensor"):
        net.add_identity(y).get_output(0).dtype = trt.float16
    net.get_input(0).dtype, net.get_output(0).dtype = trt.float16, trt.int32
    assert (net.get_input(0).dtype, net.get_output(0).dtype) == (trt.float16, trt.int32)
    config = trt.IBuilderConfig()
    config.builder_optimization_level = 0
    engine = trt.Builder(trt.Logger()).build_engine_with_config(net, config)
    assert [(name := engine[i], engine.get_tensor_dtype(name)) for i in range(2)] == [("x", trt.float16), ("y", trt.int32)]
    a, out = np.array([[1, -2, 3], [4, 5, -6]], np.float16), np.zeros((2, 3), np.int32)
    assert engine.create_execution_context().execute_v2([a.ctypes.data, out.ctypes.data])
    np.testing.assert_array_equal(out, np.maximum(a, 0))


def test_sizes_that_a_profile_fixes_are_static():
    builder = trt.Builder(trt.Logger())
    net = builder.create_network()
    net.mark_output(net.add_identity(net.add_input("x", trt.float32, (-1, -1))).get_output(0))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.builder_optimization_level = 0
    profile.set_shape("x", (2, 1), (2, 3), (2, 4))
    config.add_optimization_profile(profile)
    engine = builder.build_engine_with_config(net, config)
    assert [engine.get_tensor_shape(engine[i]) for i in range(2)] == [(2, -1), (2, -1)]


def test_element_types_are_no_integers():
    """Polygraphy takes integers for ONNX's element types, in which 1 is FLOAT."""
    assert not isinstance(trt.float16, int)
    assert (int(trt.float16), str(trt.float16), trt.DataType(1), trt.float16.itemsize, trt.int4.itemsize) == (1, "DataType.HALF", trt.float16, 2, 0.5)


def test_dims_take_sizes_or_a_sequence():
    assert trt.Dims4(1, 2, 3, 4) == trt.Dims((1, 2, 3, 4)) == (1, 2, 3, 4)
    assert (trt.DimsHW((5, 6)).h, trt.DimsHW(5, 6).w) == (5, 6)
    assert (trt.Dims2(), trt.Dims(), trt.Permutation([1, 0])) == ((0, 0), (), (1, 0))
    with pytest.raises(ValueError, match="Dims3 has 3 sizes, not 2"):
        trt.Dims3(1, 2)


def test_options_that_are_not_served_say_why():
    config = trt.IBuilderConfig()
    with pytest.raises(trt.NotServedError, match="STRIP_PLAN"):
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    with pytest.raises(trt.NotServedError, match="TensorRT 11 removed it"):
        _ = config.algorithm_selector
    with pytest.raises(trt.NotServedError, match=r"whet\.trt does not serve tensorrt\.IGpuAllocator"):
        _ = trt.IGpuAllocator


def member_names():
    """The names of tensorrt_names.txt: members of classes of 10.16 and 11.1, as `Class.member`."""
    owner = ""
    for word in (ROOT / "tests" / "trt" / "tensorrt_names.txt").read_text().split():
        if word.endswith(":"):
            owner = word[:-1]
        else:
            yield f"{owner}.{word}"


def test_coverage_has_every_name(capsys):
    table = trt.coverage()
    assert sorted({*NAMES, *member_names()} - set(table)) == []
    for name in NAMES:
        assert hasattr(trt, name) == (table[name] == "served"), name
    assert "Refitter" in capsys.readouterr().out


def test_the_table_says_of_members_what_objects_do(engine):
    builder = trt.Builder(trt.Logger())
    network = builder.create_network()
    objects = [
        builder, network, builder.create_builder_config(), builder.create_optimization_profile(), trt.OnnxParser(network, trt.Logger()),
        trt.Runtime(trt.Logger()), engine, engine.create_execution_context(), engine.create_engine_inspector(), trt.Refitter(engine, trt.Logger()),
        trt.ITimingCache(), network.add_input("x", trt.float32, (2,)),
    ]  # fmt: skip
    by_class = {type(o).__name__: o for o in objects}
    table, checked = trt.coverage(), 0
    for name in member_names():
        owner, _, member = name.partition(".")
        if owner in by_class:
            assert (member in dir(by_class[owner])) == (table[name] == "served"), name
            checked += 1
            if table[name] != "served":
                with pytest.raises(trt.NotServedError, match=rf"serve {owner}\.{member}: "):
                    getattr(by_class[owner], member)
                with pytest.raises(trt.NotServedError):
                    setattr(by_class[owner], member, None)
    assert checked > 200


def test_installs_as_tensorrt(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    trt.install()
    assert importlib.import_module("tensorrt") is trt
    monkeypatch.setitem(sys.modules, "tensorrt", subprocess)
    with pytest.raises(ImportError, match="before the first import"):
        trt.install()


def test_the_example_builds_an_engine(tmp_path):
    w = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    build_engine = runpy.run_path(str(ROOT / "examples" / "build_engine.py"))["build_engine"]
    data = build_engine(tmp_path / "m.onnx")
    context = trt.Runtime(trt.Logger()).deserialize_cuda_engine(data).create_execution_context()
    a, out = np.arange(8, dtype=np.float32).reshape(2, 4), np.zeros((2, 4), np.float32)
    assert context.execute_v2([a.ctypes.data, out.ctypes.data])
    np.testing.assert_array_equal(out, a)


def test_polygraphy_compares_with_onnx_runtime(model):
    """`polygraphy run --trt --onnxrt` and `inspect model` on the CPU."""
    pytest.importorskip("polygraphy")
    shapes = [f"--trt-{k}-shapes=x:[{n},3,8,8]" for k, n in (("min", 1), ("opt", 2), ("max", 4))]
    options = ["--builder-optimization-level=0", *shapes, "--input-shapes=x:[3,3,8,8]"]
    command = [sys.executable, "-m", "whet.trt", "polygraphy", "run", str(model[0]), "--trt", "--onnxrt", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    command = [sys.executable, "-m", "whet.trt", "polygraphy", "inspect", "model", str(model[0]), "--display-as=trt", "--show", "layers"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CONVOLUTION" in done.stdout

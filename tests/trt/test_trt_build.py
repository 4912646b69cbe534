"""Builds and runs through whet.trt: calibrators, dynamic ranges, monitors, profilers, error recorders, timing caches, the inspector, streams."""

import json
import struct

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import whet.trt as trt
from whet.backends.cuda import driver

R = np.random.default_rng(0)
W = R.standard_normal((8, 3, 3, 3)).astype(np.float32) / 4
BATCHES = [R.standard_normal((2, 3, 8, 8)).astype(np.float32) for _ in range(4)]


@pytest.fixture(scope="module")
def model():
    """conv, ReLU, conv with a dynamic batch; the model's bytes."""
    ort = pytest.importorskip("onnxruntime")
    v = R.standard_normal((4, 8, 1, 1)).astype(np.float32) / 3
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "v"], ["y"], name="conv2"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", c, 8, 8]) for n, c in (("x", 3), ("y", 4)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(W, "w"), numpy_helper.from_array(v, "v")])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10).SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, lambda x: session.run(None, {"x": x})[0]


class Log(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.messages = []

    def log(self, severity, msg):
        self.messages.append((severity, msg))


def parsed(data, **options):
    """A builder, the network of a model, and a config with a profile for 1 to 4 samples."""
    builder = trt.Builder(Log())
    network = builder.create_network()
    assert trt.OnnxParser(network, builder.logger).parse(data)
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    config.set_flag(trt.BuilderFlag.DISABLE_TIMING_CACHE)
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
    config.add_optimization_profile(profile)
    for name, value in options.items():
        setattr(config, name, value)
    return builder, network, config


def run(engine, x):
    context = engine.create_execution_context()
    assert context.set_input_shape("x", x.shape)
    y = np.zeros(context.get_tensor_shape("y"), np.float32)
    context.set_tensor_address("x", x.ctypes.data)
    context.set_tensor_address("y", y.ctypes.data)
    assert context.execute_async_v3(0)
    return y


def layers_of(engine):
    return json.loads(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))["Layers"]


def calibrator(base):
    class Calibrator(base):
        def __init__(self, cache=None):
            super().__init__()
            self.batches, self.cache, self.written = iter(BATCHES), cache, None

        def get_batch_size(self):
            return 2

        def get_batch(self, names):
            assert names == ["x"]
            self.held = next(self.batches, None)
            return None if self.held is None else [self.held.ctypes.data]

        def read_calibration_cache(self):
            return self.cache

        def write_calibration_cache(self, cache):
            self.written = cache.tobytes()

    return Calibrator


def with_int8(data, **options):
    """INT8 permitted: the engine computes in INT8 where that is faster on the machine of the test."""
    builder, network, config = parsed(data, **options)
    config.set_flag(trt.BuilderFlag.INT8)
    return builder, network, config


def scales(cache):
    """The scales in a calibration cache by tensor."""
    lines = cache.decode().splitlines()
    assert lines[0].startswith("TRT-")
    return {name: struct.unpack(">f", bytes.fromhex(word))[0] for name, _, word in (line.rpartition(": ") for line in lines[1:])}


@pytest.mark.parametrize("base", [trt.IInt8EntropyCalibrator2, trt.IInt8MinMaxCalibrator])
def test_calibrators_give_ranges_and_caches(model, base):
    data, reference = model
    source = calibrator(base)()
    builder, network, config = with_int8(data, int8_calibrator=source)
    y, want = run(builder.build_engine_with_config(network, config), BATCHES[0]), reference(BATCHES[0])
    assert np.abs(y - want).max() < 0.1 * np.abs(want).max()
    found, largest = scales(source.written), max(np.abs(b).max() for b in BATCHES)
    assert set(found) >= {"x"}
    if base is trt.IInt8MinMaxCalibrator:
        assert found["x"] == pytest.approx(largest / 127)
    else:
        assert found["x"] <= largest / 127 * 1.01
    again = calibrator(base)(source.written)
    builder, network, config = with_int8(data, int8_calibrator=again)
    assert builder.build_serialized_network(network, config) is not None
    assert again.written is None
    assert next(again.batches) is BATCHES[0]  # the cache was enough


def test_damaged_calibration_caches_fail_with_the_reason(model):
    builder, network, config = with_int8(model[0], int8_calibrator=calibrator(trt.IInt8MinMaxCalibrator)(b"TRT-1\nx: 00\n"))
    assert builder.build_serialized_network(network, config) is None
    assert "8 hexadecimal digits" in builder.logger.messages[-1][1]


def test_calibrating_a_network_without_quantizable_layers_writes_an_empty_cache():
    builder = trt.Builder(Log())
    network = builder.create_network()
    x = network.add_input("x", trt.float32, (2, 3, 8, 8))
    network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    config.set_flag(trt.BuilderFlag.INT8)
    config.int8_calibrator = calibrator(trt.IInt8MinMaxCalibrator)()
    assert builder.build_serialized_network(network, config) is not None
    assert scales(config.int8_calibrator.written) == {}


def test_dynamic_ranges_replace_a_calibrator(model):
    data, reference = model
    builder, network, config = with_int8(data)
    tensors = [network.get_input(0), *(layer.get_output(0) for layer in network)]
    assert tensors[0].set_dynamic_range(-4.0, 4.0)
    assert builder.build_serialized_network(network, config) is None
    assert "no range for %" in builder.logger.messages[-1][1]
    for t in tensors[1:]:
        assert t.dynamic_range is None
        t.dynamic_range = (-4.0, 4.0)
    assert not tensors[0].set_dynamic_range(1.0, -1.0)
    assert tensors[0].dynamic_range == (-4.0, 4.0)
    y, want = run(builder.build_engine_with_config(network, config), BATCHES[0]), reference(BATCHES[0])
    assert np.abs(y - want).max() < 0.2 * np.abs(want).max()


def test_int8_without_ranges_fails_with_the_reason(model):
    builder, network, config = parsed(model[0])
    config.set_flag(trt.BuilderFlag.INT8)
    assert builder.build_serialized_network(network, config) is None
    assert "ranges" in builder.logger.messages[-1][1]


class Monitor(trt.IProgressMonitor):
    def __init__(self, cancel_at=None):
        super().__init__()
        self.calls, self.cancel_at = [], cancel_at

    def phase_start(self, phase_name, parent_phase, num_steps):
        self.calls.append(("start", phase_name, parent_phase))

    def step_complete(self, phase_name, step):
        self.calls.append(("step", phase_name, step))
        return phase_name != self.cancel_at

    def phase_finish(self, phase_name):
        self.calls.append(("finish", phase_name))


def test_progress_monitors_see_phases_and_cancel(model):
    monitor = Monitor()
    builder, network, config = parsed(model[0], progress_monitor=monitor)
    assert builder.build_serialized_network(network, config) is not None
    assert monitor.calls[0] == ("start", "Building Engine", None)
    assert monitor.calls[-1] == ("finish", "Building Engine")
    phases = [c[1] for c in monitor.calls if c[0] == "start"]
    assert sorted(phases) == sorted(c[1] for c in monitor.calls if c[0] == "finish")
    assert ("start", "passes", "Building Engine") in monitor.calls
    builder, network, config = parsed(model[0], progress_monitor=Monitor(cancel_at="passes"))
    assert builder.build_serialized_network(network, config) is None
    assert "cancelled" in builder.logger.messages[-1][1]


class Recorder(trt.IErrorRecorder):
    def __init__(self):
        super().__init__()
        self.errors = []

    def report_error(self, code, desc):
        self.errors.append((code, desc))
        return True


def test_error_recorders_get_codes_and_messages():
    runtime, recorder = trt.Runtime(Log()), Recorder()
    runtime.error_recorder = recorder
    assert runtime.deserialize_cuda_engine(b"not an engine") is None
    assert recorder.errors[0][0] == trt.ErrorCodeTRT.FAILED_INITIALIZATION
    assert recorder.errors[0][1] == runtime.logger.messages[-1][1]


@pytest.fixture(scope="module")
def engine(model):
    builder, network, config = parsed(model[0])
    return builder.build_engine_with_config(network, config)


def test_profilers_get_layer_times_and_outputs_stay_right(model, engine):
    class Times(trt.IProfiler):
        def __init__(self):
            super().__init__()
            self.rows = []

        def report_layer_time(self, layer_name, ms):
            self.rows.append((layer_name, ms))

    context, profiler = engine.create_execution_context(), Times()
    context.profiler = profiler
    x, y = BATCHES[0], np.zeros((2, 4, 8, 8), np.float32)
    assert context.execute_v2([x.ctypes.data, y.ctypes.data])
    np.testing.assert_allclose(y, model[1](x), rtol=1e-4, atol=1e-5)
    assert len(profiler.rows) == engine.num_layers
    assert [n for n, _ in profiler.rows] == [layer["Name"] for layer in layers_of(engine)]
    assert all(ms >= 0 for _, ms in profiler.rows)
    context.enqueue_emits_profile = False
    assert context.execute_v2([x.ctypes.data, y.ctypes.data])
    assert len(profiler.rows) == engine.num_layers
    assert context.report_to_profiler()
    assert len(profiler.rows) == 2 * engine.num_layers
    assert not context.report_to_profiler()


def test_contexts_describe_memory_and_report_bad_shapes(engine):
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    recorder = Recorder()
    context.error_recorder = recorder
    assert not context.set_input_shape("x", (9, 3, 8, 8))
    assert recorder.errors[0][0] == trt.ErrorCodeTRT.INVALID_ARGUMENT
    assert context.set_input_shape("x", (3, 3, 8, 8))
    assert context.infer_shapes() == []
    assert context.get_tensor_strides("y") == (256, 64, 8, 1)
    assert context.get_max_output_size("y") == 4 * 4 * 64 * 4
    assert context.update_device_memory_size_for_shapes() == engine.device_memory_size_v2 > 0
    context.set_device_memory(0, 0)
    assert not context.execute_async_v3(0)
    assert recorder.errors[-1][0] == trt.ErrorCodeTRT.INVALID_STATE
    with pytest.raises(trt.NotServedError, match="mark_debug"):
        context.unfused_tensors_debug_state  # noqa: B018 - reading it raises


def test_the_inspector_writes_tensorrts_json(engine):
    inspector = engine.create_engine_inspector()
    context = engine.create_execution_context()
    context.set_input_shape("x", (4, 3, 8, 8))
    inspector.execution_context = context
    data = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    assert data["Bindings"] == ["x", "y"]
    first = json.loads(inspector.get_layer_information(0, trt.LayerInformationFormat.JSON))
    assert first == data["Layers"][0]
    assert {"Name", "LayerType", "Inputs", "Outputs", "TacticName"} <= set(first)
    assert first["Inputs"][0]["Dimensions"][0] == 4
    lines = inspector.get_engine_information(trt.LayerInformationFormat.ONELINE).splitlines()
    assert len(lines) == engine.num_layers
    assert lines[0] + "" == inspector.get_layer_information(0, trt.LayerInformationFormat.ONELINE)


def test_engines_stream_in_and_out(model):
    class Writer(trt.IStreamWriter):
        def __init__(self):
            super().__init__()
            self.parts = []

        def write(self, data):
            self.parts.append(bytes(data))
            return len(data)

    class Reader(trt.IStreamReaderV2):
        def __init__(self, data):
            super().__init__()
            self.data, self.at = data, len(data)

        def read(self, num_bytes, stream):
            part = self.data[self.at : self.at + 1000]
            self.at += len(part)
            return part

        def seek(self, offset, where):
            assert where == trt.SeekPosition.SET
            self.at = offset
            return True

    writer = Writer()
    builder, network, config = parsed(model[0])
    assert builder.build_serialized_network_to_stream(network, config, writer)
    engine = trt.Runtime(Log()).deserialize_cuda_engine(Reader(b"".join(writer.parts)))
    np.testing.assert_allclose(run(engine, BATCHES[1]), model[1](BATCHES[1]), rtol=1e-4, atol=1e-5)
    serialization = engine.create_serialization_config()
    assert serialization.set_flag(trt.SerializationFlag.EXCLUDE_LEAN_RUNTIME)
    assert engine.serialize_with_config(serialization).nbytes > 0
    with pytest.raises(trt.NotServedError, match="EXCLUDE_WEIGHTS"):
        serialization.set_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)


def test_timing_caches_combine(model):
    builder, network, config = parsed(model[0], builder_optimization_level=1)
    config.clear_flag(trt.BuilderFlag.DISABLE_TIMING_CACHE)
    cache = config.create_timing_cache(b"")
    assert config.set_timing_cache(cache, ignore_mismatch=False)
    assert builder.build_serialized_network(network, config) is not None
    keys = cache.queryKeys()
    assert keys
    other = config.create_timing_cache(cache.serialize())
    empty = config.create_timing_cache(b"")
    assert empty.combine(other, ignore_mismatch=False)
    assert empty.queryKeys() == keys
    assert cache.combine(other, ignore_mismatch=False)
    assert cache.queryKeys() == keys
    assert not cache.combine(trt.ITimingCache(b"damaged"), ignore_mismatch=False)
    assert other.reset()
    assert other.queryKeys() == []


def test_profiles_and_options_keep_their_values():
    profile = trt.IOptimizationProfile()
    with pytest.raises(ValueError, match="not in order"):
        profile.set_shape("x", (2, 3), (1, 3), (4, 3))
    assert profile
    assert profile.get_shape("x") == []
    config = trt.IBuilderConfig()
    config.set_quantization_flag(trt.QuantizationFlag.CALIBRATE_BEFORE_FUSION)
    assert config.get_quantization_flag(trt.QuantizationFlag.CALIBRATE_BEFORE_FUSION)
    config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    assert config.get_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806)
    config.set_tactic_sources(1 << trt.TacticSource.CUDNN)
    assert config.get_tactic_sources() == 1 << trt.TacticSource.CUDNN
    for name, value, why in (("engine_capability", trt.EngineCapability.SAFETY, "safety"), ("default_device_type", trt.DeviceType.DLA, "DLA")):
        with pytest.raises(trt.NotServedError, match=why):
            setattr(config, name, value)
    config.reset()
    assert config.get_tactic_sources() == 0b11000  # TensorRT 10's default: EDGE_MASK_CONVOLUTIONS and JIT_CONVOLUTIONS
    assert not config.get_quantization_flag(trt.QuantizationFlag.CALIBRATE_BEFORE_FUSION)


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason="no GPU")
def test_engines_run_on_device_memory_and_streams(model):
    from whet.backends import get_backend

    backend = get_backend("cuda")
    trt.use_backend("cuda")
    try:
        builder, network, config = parsed(model[0])
        engine = builder.build_engine_with_config(network, config)
    finally:
        trt.use_backend("cpu")
    context = engine.create_execution_context()
    for x in BATCHES[:2]:
        context.set_input_shape("x", x.shape)
        buffers = {n: backend.allocate(4 * int(np.prod(context.get_tensor_shape(n))), 256) for n in ("x", "y")}
        backend.write_address(buffers["x"].address, x)
        assert context.execute_v2([buffers["x"].address, buffers["y"].address])
        y = backend.read_address(buffers["y"].address, buffers["y"].nbytes).view(np.float32).reshape(2, 4, 8, 8)
        np.testing.assert_allclose(y, model[1](x), rtol=1e-2, atol=1e-2)

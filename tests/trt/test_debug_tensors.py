"""Debug tensors: inner tensors that a listener receives after a run."""

import ctypes

import numpy as np
import pytest

import whet.trt as trt
from whet.backends import get_backend
from whet.backends.cuda import driver

RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=(8, c, 3, 3)).astype(np.float32) for c in (3, 8)]
X = RNG.normal(size=(1, 3, 8, 8)).astype(np.float32)


class Recorder(trt.IDebugListener):
    """Keeps the values that it receives."""

    def __init__(self, answer=True):
        super().__init__()
        self.values, self.about, self.answer = {}, [], answer

    def process_debug_tensor(self, addr, location, type, shape, name, stream):
        data = (ctypes.c_float * int(np.prod(shape))).from_address(addr)
        self.values[name] = np.array(data, np.float32).reshape(shape)
        self.about.append((name, location, type, stream))
        return self.answer


def serialize_engine(mark=("conv", "sum")):
    """Convolution, ReLU, convolution and a sum with the first convolution; the debug tensors are the first convolution and the sum."""
    builder = trt.Builder(trt.Logger())
    network = builder.create_network()
    x = network.add_input("x", trt.float32, X.shape)

    def convolve(x, weights):
        layer = network.add_convolution_nd(x, 8, (3, 3), weights, np.zeros(8, np.float32))
        layer.padding_nd = (1, 1)
        return layer.get_output(0)

    tensors = {"conv": convolve(x, WEIGHTS[0])}
    relu = network.add_activation(tensors["conv"], trt.ActivationType.RELU).get_output(0)
    tensors["sum"] = network.add_elementwise(convolve(relu, WEIGHTS[1]), tensors["conv"], trt.ElementWiseOperation.SUM).get_output(0)
    y = network.add_activation(tensors["sum"], trt.ActivationType.RELU).get_output(0)
    y.name = "y"
    network.mark_output(y)
    for name, tensor in tensors.items():
        tensor.name = name
        assert not network.is_debug_tensor(tensor)
        network.mark_debug(tensor)
        assert network.is_debug_tensor(tensor)
        if name not in mark:
            network.unmark_debug(tensor)
            assert not network.is_debug_tensor(tensor)
    return builder.build_serialized_network(network, builder.create_builder_config())


def expected():
    """The two debug tensors and the output, by PyTorch's definition of a convolution in NumPy."""

    def convolve(x, w):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        return np.einsum("nchwij,ocij->nohw", windows, w)

    conv = convolve(X, WEIGHTS[0])
    total = convolve(np.maximum(conv, 0), WEIGHTS[1]) + conv
    return {"conv": conv, "sum": total}, np.maximum(total, 0)


@pytest.fixture(scope="module")
def engine():
    return trt.Runtime(trt.Logger()).deserialize_cuda_engine(serialize_engine())


def run(context):
    x, y = X.copy(), np.zeros((1, 8, 8, 8), np.float32)
    context.set_tensor_address("x", x.ctypes.data)
    context.set_tensor_address("y", y.ctypes.data)
    return context.execute_async_v3(0), y


def test_debug_tensors_are_no_outputs(engine):
    assert [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)] == ["x", "y"]
    assert [engine.is_debug_tensor(n) for n in ("conv", "sum", "y", "other")] == [True, True, False, False]
    assert engine.get_tensor_mode("conv") == trt.TensorIOMode.NONE
    assert not engine.create_execution_context().set_tensor_address("conv", 64)


def test_the_listener_receives_the_tensors_that_are_on(engine):
    context, listener = engine.create_execution_context(), Recorder()
    assert context.get_debug_listener() is None
    assert context.set_debug_listener(listener)
    assert context.get_debug_listener() is listener
    done, y = run(context)
    values, output = expected()
    assert done
    np.testing.assert_allclose(y, output, rtol=1e-4, atol=1e-4)
    assert not listener.values, "all are off at first"
    assert context.set_tensor_debug_state("sum", True)
    assert not context.set_tensor_debug_state("y", True)
    assert (context.get_debug_state("sum"), context.get_debug_state("conv")) == (True, False)
    assert run(context)[0]
    assert listener.about == [("sum", trt.TensorLocation.HOST, trt.float32, 0)]
    np.testing.assert_allclose(listener.values["sum"], values["sum"], rtol=1e-4, atol=1e-4)
    context.set_all_tensors_debug_state(True)
    listener.about.clear()
    assert run(context)[0]
    assert [name for name, *_ in listener.about] == ["conv", "sum"]
    np.testing.assert_allclose(listener.values["conv"], values["conv"], rtol=1e-4, atol=1e-4)
    context.set_all_tensors_debug_state(False)
    listener.about.clear()
    run(context)
    assert listener.about == []


def test_a_profiler_and_a_listener_work_together(engine):
    class Times(trt.IProfiler):
        def __init__(self):
            super().__init__()
            self.layers = []

        def report_layer_time(self, layer_name, ms):
            self.layers.append(layer_name)

    context, listener, times = engine.create_execution_context(), Recorder(), Times()
    context.set_debug_listener(listener)
    context.set_all_tensors_debug_state(True)
    context.profiler = times
    assert run(context)[0]
    assert set(listener.values) == {"conv", "sum"}
    assert len(times.layers) == engine.num_layers


def test_a_listener_can_fail_the_run(engine):
    texts = []

    class Errors(trt.IErrorRecorder):
        def report_error(self, val, desc):
            texts.append(desc)
            return True

    context = engine.create_execution_context()
    context.error_recorder = Errors()
    context.set_debug_listener(Recorder(answer=False))
    context.set_tensor_debug_state("conv", True)
    assert not run(context)[0]
    assert "debug listener returned False for 'conv'" in texts[-1]


def test_an_unmarked_tensor_is_none():
    engine = trt.Runtime(trt.Logger()).deserialize_cuda_engine(serialize_engine(mark=("sum",)))
    assert [engine.is_debug_tensor(n) for n in ("conv", "sum")] == [False, True]
    assert not engine.create_execution_context().set_tensor_debug_state("conv", True)


@pytest.mark.gpu
@pytest.mark.skipif(driver.why_unavailable() is not None, reason="no GPU")
def test_debug_tensors_on_a_gpu():
    """Also runs without a listener, in which nobody gives the debug tensors an address."""
    backend = get_backend("cuda")
    trt.use_backend("cuda")
    try:
        engine = trt.Runtime(trt.Logger()).deserialize_cuda_engine(serialize_engine())
    finally:
        trt.use_backend("cpu")
    context, listener = engine.create_execution_context(), Recorder()
    values, output = expected()
    buffers = {n: backend.allocate(4 * size, 256) for n, size in (("x", X.size), ("y", output.size))}
    backend.write_address(buffers["x"].address, X)
    for active, received in ((False, 0), (True, 2), (False, 2)):
        context.set_debug_listener(listener)
        context.set_all_tensors_debug_state(active)
        assert context.execute_v2([buffers["x"].address, buffers["y"].address])
        y = backend.read_address(buffers["y"].address, buffers["y"].nbytes).view(np.float32)[: output.size].reshape(output.shape)
        np.testing.assert_allclose(y, output, rtol=0, atol=1e-3 * np.abs(output).max())  # TF32 rounds the terms, and some sums cancel
        assert len(listener.about) == received
    np.testing.assert_allclose(listener.values["sum"], values["sum"], rtol=0, atol=1e-3 * np.abs(values["sum"]).max())

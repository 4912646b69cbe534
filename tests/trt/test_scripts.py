"""Scripts written for TensorRT and cuda-python, run by `python -m whet.trt`: the steps of NVIDIA's samples, on the CPU."""

import subprocess
import sys

import pytest

BUFFERS = """
import ctypes, sys
import numpy as np
import tensorrt as trt
from cuda.bindings import runtime as cudart

def cuda_call(result):
    error, *values = result
    assert error == cudart.cudaError_t.cudaSuccess, error
    return values[0] if values else None

class Buffer:
    def __init__(self, count, dtype):
        self.nbytes = count * np.dtype(dtype).itemsize
        self.host_ptr, self.device = cuda_call(cudart.cudaMallocHost(self.nbytes)), cuda_call(cudart.cudaMalloc(self.nbytes))
        pointer = ctypes.cast(self.host_ptr, ctypes.POINTER(ctypes.c_ubyte))
        self.host = np.ctypeslib.as_array(pointer, (self.nbytes,)).view(dtype)

    def free(self):
        cuda_call(cudart.cudaFree(self.device))
        cuda_call(cudart.cudaFreeHost(self.host_ptr))

def infer(engine, *arrays):
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    buffers = {n: Buffer(trt.volume(engine.get_tensor_shape(n)), trt.nptype(engine.get_tensor_dtype(n))) for n in names}
    context, stream = engine.create_execution_context(), cuda_call(cudart.cudaStreamCreate())
    kinds = cudart.cudaMemcpyKind
    for name, array in zip(names, arrays):
        b = buffers[name]
        np.copyto(b.host, array.ravel())
        cuda_call(cudart.cudaMemcpyAsync(b.device, b.host.ctypes.data, b.nbytes, kinds.cudaMemcpyHostToDevice, stream))
    for name in names:
        context.set_tensor_address(name, buffers[name].device)
    assert context.execute_async_v3(stream_handle=stream)
    out = buffers[names[-1]]
    cuda_call(cudart.cudaMemcpyAsync(out.host.ctypes.data, out.device, out.nbytes, kinds.cudaMemcpyDeviceToHost, stream))
    cuda_call(cudart.cudaStreamSynchronize(stream))
    result = out.host.copy()
    for b in buffers.values():
        b.free()
    cuda_call(cudart.cudaStreamDestroy(stream))
    return result
"""

NETWORK_API = BUFFERS + """
rng = np.random.default_rng(0)
w, b, fc = (rng.standard_normal(s).astype(np.float32) for s in ((4, 1, 3, 3), (4,), (10, 36)))
logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
config = builder.create_builder_config()
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
config.builder_optimization_level = 0
data = network.add_input(name="data", dtype=trt.float32, shape=(1, 1, 8, 8))
conv = network.add_convolution_nd(input=data, num_output_maps=4, kernel_shape=(3, 3), kernel=w, bias=b)
conv.stride_nd = (1, 1)
pool = network.add_pooling_nd(input=conv.get_output(0), type=trt.PoolingType.MAX, window_size=(2, 2))
pool.stride_nd = trt.Dims2(2, 2)
flat = network.add_shuffle(pool.get_output(0))
flat.reshape_dims = trt.Dims2(1, 36)
weights = network.add_constant(trt.Dims2(10, 36), fc)
product = network.add_matrix_multiply(
    flat.get_output(0), trt.MatrixOperation.NONE, weights.get_output(0), trt.MatrixOperation.TRANSPOSE
)
back = network.add_shuffle(product.get_output(0))
back.reshape_dims = trt.Dims4(1, 10, 1, 1)
back.get_output(0).name = "prob"
network.mark_output(tensor=back.get_output(0))
engine = trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
x = rng.standard_normal((8, 8)).astype(np.float32)
windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3))
features = np.einsum("hwij,cij->chw", windows, w[:, 0]) + b[:, None, None]
pooled = features.reshape(4, 3, 2, 3, 2).max(axis=(2, 4)).ravel()
np.testing.assert_allclose(infer(engine, x), fc @ pooled, rtol=1e-3, atol=1e-4)
print("done", sys.argv[1:], __file__)
"""

MONITORED = BUFFERS + """
import onnx

class Monitor(trt.IProgressMonitor):
    def __init__(self):
        trt.IProgressMonitor.__init__(self)
        self.active, self.seen = {}, []

    def phase_start(self, phase_name, parent_phase, num_steps):
        assert parent_phase is None or parent_phase in self.active
        self.active[phase_name] = num_steps
        print(f"{0 / num_steps:.0%} {phase_name}")  # as the bars of monitors compute it
        self.seen.append(phase_name)

    def step_complete(self, phase_name, step):
        assert 0 <= step < self.active[phase_name]
        return True

    def phase_finish(self, phase_name):
        del self.active[phase_name]

class Writer(trt.IStreamWriter):
    def __init__(self):
        trt.IStreamWriter.__init__(self)
        self.bytes = bytes()

    def write(self, data):
        self.bytes += data
        return len(data)

logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
network, config = builder.create_network(0), builder.create_builder_config()
config.builder_optimization_level = 0
config.progress_monitor = Monitor()
parser = trt.OnnxParser(network, logger)
model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,3] y) { a = Sigmoid(x) y = Mul(a, x) }')
assert parser.parse(model.SerializeToString()), [parser.get_error(i) for i in range(parser.num_errors)]
writer = Writer()
assert builder.build_serialized_network_to_stream(network, config, writer)
engine = trt.Runtime(logger).deserialize_cuda_engine(writer.bytes)
x = np.linspace(-2, 2, 6, dtype=np.float32)
np.testing.assert_allclose(infer(engine, x), x / (1 + np.exp(-x)), rtol=1e-4)
assert config.progress_monitor.seen and not config.progress_monitor.active
print("done", sys.argv[1:], __file__)
"""


@pytest.mark.parametrize("script", [NETWORK_API, MONITORED], ids=["network_api", "monitored"])
def test_a_script_runs_with_cuda_python_on_host_memory(tmp_path, script):
    pytest.importorskip("cuda.bindings")
    (tmp_path / "sample.py").write_text(script)
    command = [sys.executable, "-m", "whet.trt", str(tmp_path / "sample.py"), "--option"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"done ['--option'] {tmp_path / 'sample.py'}"

"""NVIDIA's TensorRT as an executor: its engines have the part of the interface of whet's Engine and Context that comparisons and searches use.

Needs the package `tensorrt`, which `whet.trt.install()` also provides, on the memory of its backend.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from whet.backends import Backend, Buffer, get_backend
from whet.errors import BuildError, ContextError, EngineError, ShapeError, UsageError
from whet.network import DType, get_dtype
from whet.runtime.memory import allocate_aligned_array

Shapes = Mapping[str, tuple[int, ...]]
_FLAGS = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8", "fp8": "FP8"}


class ComparedEngine(Protocol):
    """The interface of an engine that comparisons and searches need."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def backend(self) -> Backend: ...
    def dtype(self, name: str) -> DType: ...
    def create_context(self) -> Any: ...
    def memory(self, context: Any, /) -> Any: ...  # with the bytes of one context as `peak`


class TensorRtEngine:
    """An engine that TensorRT built. `inputs` and `outputs` are names with types and shapes; sizes of -1 are dynamic."""

    def __init__(self, engine: Any, backend: Backend):
        self.engine, self.backend = engine, backend
        trt = _import_package()
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        kinds = {n: (get_dtype(np.empty(0, trt.nptype(engine.get_tensor_dtype(n)))), tuple(engine.get_tensor_shape(n))) for n in names}
        self.inputs = {n: k for n, k in kinds.items() if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT}
        self.outputs = {n: k for n, k in kinds.items() if n not in self.inputs}

    def dtype(self, name: str) -> DType:
        """The element type of an input or output."""
        return (self.inputs | self.outputs)[name][0]

    def create_context(self) -> TensorRtContext:
        """A context at the opt shapes of the first profile."""
        return TensorRtContext(self)

    def memory(self, context: TensorRtContext) -> TensorRtMemory:
        """The bytes that this engine takes on the device with one context."""
        bytes_of_file = memoryview(self.engine.serialize()).nbytes
        return TensorRtMemory(bytes_of_file, int(getattr(self.engine, "device_memory_size_v2", 0) or self.engine.device_memory_size))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes TensorRT's plan file."""
        Path(path).write_bytes(memoryview(self.engine.serialize()))


@dataclass(frozen=True)
class TensorRtMemory:
    """Bytes of a TensorRT engine. TensorRT does not report the bytes of the weights; the plan file contains them, so its size is counted."""

    plan: int
    activations: int

    @property
    def peak(self) -> int:
        """Plan and activations together."""
        return self.plan + self.activations


def find_tensorrt_version() -> str:
    """The version of the package `tensorrt`. Raises UsageError if it is not installed."""
    return str(_import_package().__version__)


def load_tensorrt(path: str | os.PathLike[str]) -> TensorRtEngine:
    """Reads a plan file of this version of TensorRT. Raises UsageError without the package, EngineError if TensorRT refuses the file."""
    trt = _import_package()
    logger = _make_logger(trt)
    engine = trt.Runtime(logger).deserialize_cuda_engine(Path(path).read_bytes())
    if engine is None:
        raise EngineError(f"TensorRT {trt.__version__} does not read {path}: {'; '.join(logger.errors) or 'no message'}")
    return TensorRtEngine(engine, _choose_memory_backend(trt))


def build_tensorrt(
    model: str, *, precisions: Sequence[str] = (), shapes: Shapes | None = None, optimization_level: int | None = None, sparse: bool = False
) -> TensorRtEngine:
    """Builds the engine of an ONNX file with TensorRT; `shapes` are those of dynamic inputs, `sparse` permits 2:4 kernels.

    Raises UsageError without the package `tensorrt` or for a precision that its version has no flag for, BuildError with TensorRT's messages.
    """
    trt = _import_package()
    logger = _make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(model):
        raise BuildError(f"TensorRT {trt.__version__} does not read {model}: {'; '.join(str(parser.get_error(i)) for i in range(parser.num_errors))}")
    config = builder.create_builder_config()
    if optimization_level is not None:
        config.builder_optimization_level = optimization_level
    for p in precisions:
        flag = getattr(trt.BuilderFlag, _FLAGS[p], None)
        if flag is None:
            raise UsageError(f"--{p}: TensorRT {trt.__version__} takes precisions from the model only (strongly typed); use a model in {p}")
        config.set_flag(flag)
    if sparse:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    dynamic = [t for t in (network.get_input(i) for i in range(network.num_inputs)) if -1 in tuple(t.shape)]
    if dynamic:
        profile = builder.create_optimization_profile()
        for t in dynamic:
            at = (shapes or {}).get(t.name, tuple(1 if d == -1 else d for d in t.shape))
            profile.set_shape(t.name, at, at, at)
        config.add_optimization_profile(profile)
    data = builder.build_serialized_network(network, config)
    engine = None if data is None else trt.Runtime(logger).deserialize_cuda_engine(data)
    if engine is None:
        raise BuildError(f"TensorRT {trt.__version__} builds no engine of {model}: {'; '.join(logger.errors) or 'no message'}")
    return TensorRtEngine(engine, _choose_memory_backend(trt))


def _import_package() -> Any:
    try:
        return importlib.import_module("tensorrt")
    except ImportError as e:
        raise UsageError(f"TensorRT's Python package is not installed ({e}): pip install tensorrt") from e


def _choose_memory_backend(trt: Any) -> Backend:
    """The backend that owns the memory of addresses given to the package: CUDA, or that of whet.trt under TensorRT's name."""
    device = getattr(trt, "device", None)
    return get_backend(device.get_backend_name() if trt.__name__ == "whet.trt" and device is not None else "cuda")


def _make_logger(trt: Any) -> Any:
    class Collecting(trt.ILogger):
        """Keeps the messages of errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(msg)

    return Collecting()


class TensorRtContext:
    """Runs a TensorRT engine on host arrays. As in whet's contexts, copies to and from a GPU are part of a run."""

    def __init__(self, engine: TensorRtEngine):
        self._engine, self._context = engine, engine.engine.create_execution_context()
        self._arrays: dict[str, np.ndarray] = {}
        self._buffers: dict[str, Buffer] = {}
        at = {n: tuple(engine.engine.get_tensor_profile_shape(n, 0)[1]) for n in engine.inputs if -1 in engine.inputs[n][1]}
        self._shapes = {n: at.get(n, shape) for n, (_, shape) in engine.inputs.items()}

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs."""
        return list(self._engine.outputs)

    @property
    def bindable_outputs(self) -> list[str]:
        """Names of the outputs that `bind` takes: all."""
        return self.output_names

    def input_shapes(self, shapes: Shapes | None = None) -> dict[str, tuple[int, ...]]:
        """Sets the given shapes and returns those of all inputs. Raises ShapeError if the engine does not take one."""
        for name, shape in (shapes or {}).items():
            if name not in self._shapes or not self._context.set_input_shape(name, tuple(shape)):
                takes = ", ".join(f"{n}: {dtype}{list(s)}" for n, (dtype, s) in self._engine.inputs.items())
                raise ShapeError(f"TensorRT's engine does not take {list(shape)} for '{name}' in its profile; its inputs are {takes}")
            self._shapes[name] = tuple(shape)
        return dict(self._shapes)

    def input_array(self, name: str) -> np.ndarray:
        """A zeroed array for an input."""
        return self._zeros(name, self._shapes[name])

    def output_array(self, name: str) -> np.ndarray:
        """A zeroed array for an output at the inputs' shapes."""
        return self._zeros(name, tuple(self._context.get_tensor_shape(name)))

    def _zeros(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = allocate_aligned_array(shape, self._engine.dtype(name).numpy)
        array.fill(0)
        return array

    def bind(self, name: str, array: Any) -> str:
        """Makes `execute` read an input from, or write an output to, a C-contiguous array."""
        if name in self._shapes:
            self.input_shapes({name: array.shape})
        self._arrays[name] = array
        backend = self._engine.backend
        if not backend.capabilities.host_memory:
            self._buffers[name] = backend.allocate(max(array.nbytes, 1), 256)
        return ""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs by name for inputs by name."""
        for name, a in inputs.items():
            self.bind(name, np.ascontiguousarray(a))
        outputs = {name: self.output_array(name) for name in self.output_names}
        for name, a in outputs.items():
            self.bind(name, a)
        self.execute()
        return outputs

    def execute(self) -> None:
        """Runs on the bound arrays. Raises ContextError if TensorRT reports a failure."""
        backend = self._engine.backend
        for name in self._engine.inputs:
            if name in self._buffers:
                backend.write(self._buffers[name], 0, self._arrays[name].reshape(-1).view(np.uint8))
        names = [*self._engine.inputs, *self._engine.outputs]
        addresses = {n: self._buffers[n].address if n in self._buffers else self._arrays[n].ctypes.data for n in names}
        order = [self._engine.engine.get_tensor_name(i) for i in range(len(names))]
        if not self._context.execute_v2([addresses[n] for n in order]):
            raise ContextError("TensorRT's execute_v2 failed; its logger has the reason")
        for name in self._engine.outputs:
            if name in self._buffers:
                array = self._arrays[name]
                array.reshape(-1).view(np.uint8)[:] = backend.read(self._buffers[name], 0, array.nbytes)

    def __enter__(self) -> TensorRtContext:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.clear()

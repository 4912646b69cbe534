"""Runtime and ICudaEngine: engines of the CPU backend under TensorRT's names."""

from __future__ import annotations

from typing import Any

import whet.runtime
from whet.engine import engine_bytes
from whet.errors import WhetError
from whet.network import TensorType
from whet.trt.context import IExecutionContext
from whet.trt.enums import DataType, ProfilingVerbosity, TensorFormat, TensorIOMode, TensorLocation, from_whet
from whet.trt.handle import Handle
from whet.trt.inspector import EngineInspector
from whet.trt.logger import ILogger


class IHostMemory(Handle, bytes):
    """Serialized data: bytes with TensorRT's `nbytes`."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return len(self)


class IStreamReader:
    """Base class of readers that subclasses implement: `read(size)` returns at most `size` bytes, and none at the end."""

    def __init__(self) -> None:
        pass

    def read(self, size: int) -> bytes:
        """The next bytes."""
        raise NotImplementedError("a subclass of IStreamReader defines read(size)")


class Runtime(Handle):
    """Opens serialized engines. Errors go to the logger, and the result is None."""

    def __init__(self, logger: ILogger):
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        """The engine in bytes or in an IStreamReader."""
        data = _read_all(serialized_engine) if isinstance(serialized_engine, IStreamReader) else bytes(serialized_engine)
        try:
            return ICudaEngine(whet.runtime.Runtime(backend="cpu").load(data))
        except WhetError as e:
            self.logger.log(ILogger.ERROR, str(e))
            return None


def _read_all(reader: IStreamReader) -> bytes:
    parts = []
    while part := reader.read(1 << 26):
        parts.append(bytes(part))
    return b"".join(parts)


class ICudaEngine(Handle):
    """An engine. Addresses of tensors are host addresses."""

    refittable = False
    num_aux_streams = 0

    def __init__(self, engine: whet.runtime.Engine):
        self.engine = engine
        self._types: dict[str, TensorType] = engine.inputs | engine.outputs
        self._names = list(self._types)

    @property
    def name(self) -> str:
        """The network's name."""
        return self.engine.plan.network.name

    @property
    def profiling_verbosity(self) -> ProfilingVerbosity:
        """DETAILED: an engine keeps all information about its layers."""
        return ProfilingVerbosity.DETAILED

    @property
    def num_io_tensors(self) -> int:
        """The number of inputs and outputs."""
        return len(self._names)

    @property
    def num_layers(self) -> int:
        """The number of layers after fusion."""
        return len(self.engine.plan.network.layers)

    @property
    def num_optimization_profiles(self) -> int:
        """The number of profiles; at least 1."""
        return max(len(self.engine.profiles), 1)

    @property
    def device_memory_size_v2(self) -> int:
        """Bytes that a context allocates for activations and scratch; weights are not included."""
        return max(arena.total for arena in self.engine.plan.arenas)

    def get_tensor_name(self, index: int) -> str:
        """Names of inputs, then of outputs."""
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """INPUT, OUTPUT, or NONE for another name."""
        return TensorIOMode.INPUT if name in self.engine.inputs else TensorIOMode.OUTPUT if name in self.engine.outputs else TensorIOMode.NONE

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape; -1 for dynamic sizes."""
        return tuple(d if isinstance(d, int) else -1 for d in self._types[name].shape)

    def get_tensor_dtype(self, name: str) -> DataType:
        """The element type."""
        return from_whet(self._types[name].dtype)

    def get_tensor_format(self, name: str, profile_index: int = 0) -> TensorFormat:
        """LINEAR: inputs and outputs are row-major."""
        return TensorFormat.LINEAR

    def get_tensor_location(self, name: str) -> TensorLocation:
        """DEVICE: the memory that `set_tensor_address` names; on this backend it is host memory."""
        return TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        """False: shapes are inferred from shapes of inputs."""
        return False

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        """[min, opt, max] of an input."""
        profiles = self.engine.profiles
        if profiles and name in profiles[profile_index].shapes:
            return list(profiles[profile_index].shapes[name])
        return [self.get_tensor_shape(name)] * 3

    def create_execution_context(self) -> IExecutionContext:
        """A context with memory of its own, on profile 0."""
        return IExecutionContext(self)

    def create_engine_inspector(self) -> EngineInspector:
        """An inspector of this engine's layers."""
        return EngineInspector(self.engine.plan)

    def serialize(self) -> IHostMemory:
        """The bytes of the engine."""
        return IHostMemory(engine_bytes(self.engine.plan))

"""Runtime and ICudaEngine: engines of whet under TensorRT's names."""

from __future__ import annotations

from math import prod
from typing import Any

import whet.runtime
from whet.engine import engine_bytes
from whet.errors import WhetError
from whet.network import Dim, TensorType
from whet.runtime.shaped import get_max_shapes
from whet.trt.context import IExecutionContext, IRuntimeConfig
from whet.trt.enums import (
    DataType,
    EngineCapability,
    EngineStat,
    ErrorCodeTRT,
    ExecutionContextAllocationStrategy,
    HardwareCompatibilityLevel,
    ProfilingVerbosity,
    SerializationFlag,
    TacticSource,
    TempfileControlFlag,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
    from_whet,
)
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle
from whet.trt.inspector import EngineInspector
from whet.trt.interfaces import IStreamReader, IStreamReaderV2, read_all, report_error
from whet.trt.logger import ILogger, Logger
from whet.trt.network import DEBUG_PREFIX
from whet.trt.plugins import IPluginRegistry, get_plugin_registry


class IHostMemory(Handle, bytes):
    """Serialized data: bytes with TensorRT's `nbytes`."""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return len(self)

    @property
    def dtype(self) -> DataType:
        """INT8: bytes."""
        return DataType.INT8


class ISerializationConfig:
    """Parts of a serialized engine."""

    def __init__(self) -> None:
        self.flags = 0

    def set_flag(self, flag: SerializationFlag) -> bool:
        """Sets a flag. Raises NotServedError for EXCLUDE_WEIGHTS and INCLUDE_REFIT."""
        if flag != SerializationFlag.EXCLUDE_LEAN_RUNTIME:
            raise NotServedError(str(SerializationFlag(flag)), "an engine file contains its weights, and they are not replaced")
        self.flags |= 1 << flag
        return True

    def clear_flag(self, flag: SerializationFlag) -> bool:
        """Clears a flag."""
        self.flags &= ~(1 << flag)
        return True

    def get_flag(self, flag: SerializationFlag) -> bool:
        """True if a flag is set."""
        return bool(self.flags & 1 << flag)


class Runtime(Handle):
    """Opens serialized engines, on the backend that they were built for. Errors go to the logger, and the result is None."""

    num_DLA_cores = 0

    def __init__(self, logger: ILogger):
        self.logger = logger
        self.error_recorder: Any = None
        self.engine_host_code_allowed = False
        self.max_threads = 1
        self.DLA_core = -1
        self.temporary_directory = ""
        self.tempfile_control_flags = 1 << TempfileControlFlag.ALLOW_IN_MEMORY_FILES | 1 << TempfileControlFlag.ALLOW_TEMPORARY_FILES

    def get_plugin_registry(self) -> IPluginRegistry:
        """The process's registry of plugins."""
        return get_plugin_registry()

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        """The engine in bytes, or in an IStreamReader or IStreamReaderV2."""
        reader = isinstance(serialized_engine, IStreamReader | IStreamReaderV2)
        data = read_all(serialized_engine) if reader else bytes(serialized_engine)
        try:
            engine = ICudaEngine(whet.runtime.Runtime().load(data), self.logger)
        except WhetError as e:
            report_error(self.logger, self.error_recorder, e, ErrorCodeTRT.FAILED_INITIALIZATION)
            return None
        engine.error_recorder = self.error_recorder
        return engine


def _find_fixed_sizes(engine: whet.runtime.Engine) -> dict[Dim, int]:
    """Dynamic sizes of inputs that have one value in all profiles."""
    values: dict[Dim, set[int]] = {}
    for profile in engine.profiles:
        for name, (low, _, high) in profile.shapes.items():
            for d, *bounds in zip(engine.inputs[name].shape, low, high, strict=True):
                values.setdefault(d, set()).update(bounds)
    return {d: next(iter(v)) for d, v in values.items() if len(v) == 1}


class ICudaEngine(Handle):
    """An engine. Addresses of tensors are host addresses on the CPU, device addresses on a GPU."""

    refittable = True  # with any weight that constants are computed from, whatever the build's flags
    num_aux_streams = 0
    has_implicit_batch_dimension = False
    engine_capability = EngineCapability.STANDARD
    hardware_compatibility_level = HardwareCompatibilityLevel.NONE
    tactic_sources = (1 << len(TacticSource)) - 1
    streamable_weights_size = 0  # weights stay in memory while an engine is open
    weight_streaming_budget = 0
    weight_streaming_budget_v2 = 0
    minimum_weight_streaming_budget = 0
    weight_streaming_scratch_memory_size = 0

    def __init__(self, engine: whet.runtime.Engine, logger: ILogger | None = None):
        self.engine = engine
        self.logger = logger or Logger()
        self.error_recorder: Any = None
        self.outputs = {n: t for n, t in engine.outputs.items() if not n.startswith(DEBUG_PREFIX)}
        self.debug_tensors = {n.removeprefix(DEBUG_PREFIX): t for n, t in engine.outputs.items() if n.startswith(DEBUG_PREFIX)}
        self._types: dict[str, TensorType] = engine.inputs | self.outputs
        self._names = list(self._types)
        self._fixed = _find_fixed_sizes(engine)

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

    @property
    def device_memory_size(self) -> int:
        """As `device_memory_size_v2`."""
        return self.device_memory_size_v2

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        """Bytes that a context allocates for a profile."""
        arenas = self.engine.plan.arenas
        return arenas[min(profile_index, len(arenas) - 1)].total

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        """Bytes that a context allocates for a profile."""
        return self.get_device_memory_size_for_profile(profile_index)

    def get_weight_streaming_automatic_budget(self) -> int:
        """0: weights are not streamed."""
        return 0

    def get_engine_stat(self, stat: EngineStat) -> int:
        """Bytes of the weights; -1 for stripped weights, of which there are none."""
        return self.engine.memory().weights if stat == EngineStat.TOTAL_WEIGHTS_SIZE else -1

    def __getitem__(self, index: int) -> str:
        return self._names[index]

    def get_tensor_name(self, index: int) -> str:
        """Names of inputs, then of outputs."""
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """INPUT, OUTPUT, or NONE for another name."""
        return TensorIOMode.INPUT if name in self.engine.inputs else TensorIOMode.OUTPUT if name in self.outputs else TensorIOMode.NONE

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape; -1 for dynamic sizes. Sizes with one value in all profiles are static, as in TensorRT."""
        return tuple(d if isinstance(d, int) else self._fixed.get(d, -1) for d in self._types[name].shape)

    def get_tensor_dtype(self, name: str) -> DataType:
        """The element type."""
        return from_whet(self._types[name].dtype)

    def get_tensor_format(self, name: str, profile_index: int = 0) -> TensorFormat:
        """LINEAR: inputs and outputs are row-major."""
        return TensorFormat.LINEAR

    def get_tensor_format_desc(self, name: str, profile_index: int = 0) -> str:
        """The format and the element type in words."""
        words = {"f32": "FP32", "f16": "FP16", "bf16": "BF16", "i8": "Int8", "i32": "Int32", "i64": "Int64", "bool": "Bool", "u8": "UInt8"}
        dtype = self._types[name].dtype.name
        return f"Row major linear {words.get(dtype, dtype)} format (kLINEAR)"

    def get_tensor_bytes_per_component(self, name: str, profile_index: int = 0) -> int:
        """-1: the format has no vectors."""
        return -1

    def get_tensor_components_per_element(self, name: str, profile_index: int = 0) -> int:
        """-1: the format has no vectors."""
        return -1

    def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
        """-1: the format has no vectors."""
        return -1

    def get_tensor_location(self, name: str) -> TensorLocation:
        """DEVICE: the memory that `set_tensor_address` names; on the CPU backend it is host memory."""
        return TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        """False: shapes are inferred from shapes of inputs, not from values."""
        return False

    def is_debug_tensor(self, name: str) -> bool:
        """True for a tensor of `INetworkDefinition.mark_debug`."""
        return name in self.debug_tensors

    def get_aliased_input_tensor(self, name: str) -> str:
        """ "": outputs have memory of their own."""
        return ""

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        """[min, opt, max] of an input."""
        profiles = self.engine.profiles
        if profiles and name in profiles[profile_index].shapes:
            return list(profiles[profile_index].shapes[name])
        return [self.get_tensor_shape(name)] * 3

    def get_tensor_profile_values(self, name: str, profile_index: int) -> list[Any]:
        """An empty list: no shapes depend on values of inputs."""
        return []

    def max_nbytes(self, name: str, profile_index: int) -> int:
        """Bytes of an input or output for the largest shapes of a profile."""
        shapes = get_max_shapes(self.engine.plan, profile_index)
        if name in self.engine.inputs:
            shape = shapes[name]
        else:
            context = self.engine.create_context(profile_index)
            context.input_shapes(shapes)
            shape = context.output_shapes()[name]
        return prod(shape) * self._types[name].dtype.bits // 8

    def create_runtime_config(self) -> IRuntimeConfig:
        """Options of a context."""
        return IRuntimeConfig()

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy | IRuntimeConfig = ExecutionContextAllocationStrategy.STATIC
    ) -> IExecutionContext:
        """A context with memory of its own, whatever the strategy, on profile 0."""
        config = strategy if isinstance(strategy, IRuntimeConfig) else IRuntimeConfig()
        if not isinstance(strategy, IRuntimeConfig):
            config.set_execution_context_allocation_strategy(strategy)
        return IExecutionContext(self, config)

    def create_execution_context_without_device_memory(self) -> IExecutionContext:
        """As `create_execution_context` with USER_MANAGED."""
        return self.create_execution_context(ExecutionContextAllocationStrategy.USER_MANAGED)

    def create_engine_inspector(self) -> EngineInspector:
        """An inspector of this engine's layers."""
        return EngineInspector(self.engine.plan)

    def create_serialization_config(self) -> ISerializationConfig:
        """Options of `serialize_with_config`."""
        return ISerializationConfig()

    def serialize_with_config(self, config: ISerializationConfig) -> IHostMemory:
        """The bytes of the engine."""
        return self.serialize()

    def serialize(self) -> IHostMemory:
        """The bytes of the engine."""
        return IHostMemory(engine_bytes(self.engine.plan))

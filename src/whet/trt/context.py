"""IExecutionContext: runs of an engine on memory that the caller names by address."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.engine import display_names, profile_suffix
from whet.errors import ContextError, WhetError
from whet.runtime.dlpack import DeviceArray
from whet.runtime.memory import make_array_at
from whet.trt.device import read_array, write_array
from whet.trt.enums import ErrorCodeTRT, ExecutionContextAllocationStrategy, ProfilingVerbosity, TensorLocation, from_whet
from whet.trt.handle import Handle
from whet.trt.interfaces import IDebugListener, IProfiler, report_error
from whet.trt.network import DEBUG_PREFIX

if TYPE_CHECKING:
    from whet.runtime import Context
    from whet.runtime.steps import BoundEngine
    from whet.trt.runtime import ICudaEngine

_ALIGNMENT = 256  # bytes; what TensorRT asks output allocators for


class IOutputAllocator:
    """Base class of allocators of outputs: subclasses define `reallocate_output_async` (or `reallocate_output`) and `notify_shape`."""

    def __init__(self) -> None:
        pass

    def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
        """The address of at least `size` bytes for an output (TensorRT 8's form)."""
        raise NotImplementedError("a subclass of IOutputAllocator defines reallocate_output_async")

    def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        """The address of at least `size` bytes for an output."""
        return self.reallocate_output(tensor_name, memory, size, alignment)

    def notify_shape(self, tensor_name: str, shape: tuple[int, ...]) -> None:
        """Receives an output's shape before its values are written."""
        raise NotImplementedError("a subclass of IOutputAllocator defines notify_shape")


class IRuntimeConfig(Handle):
    """Options of a context."""

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        """Sets the strategy; contexts of whet allocate their own memory in all of them."""
        self._strategy = strategy

    def get_execution_context_allocation_strategy(self) -> ExecutionContextAllocationStrategy:
        """The strategy."""
        return self._strategy


class IExecutionContext(Handle):
    """Runs an engine on memory that the caller keeps alive: host addresses on the CPU, where runs are synchronous; device addresses on a GPU."""

    debug_sync = False
    persistent_cache_limit = 0
    nvtx_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
    all_binding_shapes_specified = True  # shapes start at the profile's opt shapes
    all_shape_inputs_specified = True
    name = ""

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig | None = None):
        self.engine = engine
        self.active_optimization_profile = 0
        self.error_recorder: Any = None
        self.profiler: IProfiler | None = None
        self.enqueue_emits_profile = True
        self.temporary_allocator: Any = None
        self._runtime_config = config or IRuntimeConfig()
        self._engine = engine.engine
        self._held = self._engine.create_context()
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._consumed_event = 0
        self._times: list[tuple[str, float]] = []
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}  # on a GPU: what is bound, by name
        self._copied: dict[str, bool] = {}  # True where kernels cannot use the caller's memory
        self._pending: Any = None
        self._listener: IDebugListener | None = None
        self._debugged: set[str] = set()  # names of active debug tensors

    @property
    def _context(self) -> Context:
        """The context of the engine as it is now: a Refitter may have replaced its weights."""
        if self._engine is not self.engine.engine:
            shapes = self._held.input_shapes()
            self._held.close()
            self._engine = self.engine.engine
            self._held = self._engine.create_context(self.active_optimization_profile)
            for name, shape in shapes.items():
                self._held.set_input_shape(name, shape)
            self._bound.clear()
        return self._held

    # shapes

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Selects a profile; False for an unknown index. Input shapes are to be set again."""
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return False
        if profile_index != self.active_optimization_profile:
            self._context.close()
            self._held = self.engine.engine.create_context(profile_index)
            self.active_optimization_profile = profile_index
            self._bound.clear()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Sets an input's shape; False outside the profile."""
        try:
            self._context.set_input_shape(name, tuple(shape))
        except WhetError as e:
            self._report(e, ErrorCodeTRT.INVALID_ARGUMENT)
            return False
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or output for the current input shapes."""
        shapes = self._context.input_shapes()
        return tuple(shapes[name] if name in shapes else self._context.output_shapes()[name])

    def get_tensor_strides(self, name: str) -> tuple[int, ...]:
        """The strides in elements: row-major."""
        shape = self.get_tensor_shape(name)
        return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))

    def infer_shapes(self) -> list[str]:
        """Names of inputs without a shape: none, shapes start at the profile's opt shapes."""
        return []

    def get_max_output_size(self, name: str) -> int:
        """Bytes of an output for the largest shapes of the profile."""
        return self.engine.max_nbytes(name, self.active_optimization_profile)

    # memory

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Sets the address of an input or output; False for an unknown name or address 0."""
        if name not in (*self.engine.engine.inputs, *self.engine.outputs) or not memory:
            return False
        self._addresses[name] = int(memory)
        return True

    def get_tensor_address(self, name: str) -> int:
        """The address of an input or output; 0 if it is not set."""
        return self._addresses.get(name, 0)

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator | None) -> bool:
        """Gives an output an allocator, which replaces its address; None removes it. False for an unknown name."""
        if name not in self.engine.outputs:
            return False
        if output_allocator is None:
            self._allocators.pop(name, None)
        else:
            self._allocators[name] = output_allocator
        return True

    def get_output_allocator(self, name: str) -> IOutputAllocator | None:
        """The allocator of an output."""
        return self._allocators.get(name)

    def set_device_memory(self, memory: int, size: int) -> None:
        """Takes activation memory, which is not used: a context allocates its own."""

    def update_device_memory_size_for_shapes(self) -> int:
        """Bytes of activation memory."""
        return self.engine.device_memory_size_v2

    def get_runtime_config(self) -> IRuntimeConfig:
        """The options that the context was created with."""
        return self._runtime_config

    def set_aux_streams(self, aux_streams: Sequence[int]) -> None:
        """Does nothing: a run uses one stream."""

    def set_input_consumed_event(self, event: int) -> bool:
        """Keeps the event. Inputs are consumed when the run is done; record the event on the stream after the run."""
        self._consumed_event = event
        return True

    def get_input_consumed_event(self) -> int:
        """The event of `set_input_consumed_event`."""
        return self._consumed_event

    # debug tensors

    def set_debug_listener(self, listener: IDebugListener | None) -> bool:
        """Sets the listener that receives the active debug tensors after each run; None removes it."""
        self._listener = listener
        return True

    def get_debug_listener(self) -> IDebugListener | None:
        """The listener of `set_debug_listener`."""
        return self._listener

    def set_tensor_debug_state(self, name: str, flag: bool) -> bool:
        """Switches a debug tensor on or off (initially off); False for a name that is none."""
        if name not in self.engine.debug_tensors:
            return False
        (self._debugged.add if flag else self._debugged.discard)(name)
        return True

    def get_debug_state(self, name: str) -> bool:
        """True for a debug tensor that is on."""
        return name in self._debugged

    def set_all_tensors_debug_state(self, flag: bool) -> bool:
        """Switches all debug tensors on or off."""
        self._debugged = set(self.engine.debug_tensors) if flag else set()
        return True

    # running

    def execute_v2(self, bindings: Sequence[int]) -> bool:
        """Runs with the addresses of inputs and outputs in the order of `get_tensor_name`; returns when the outputs are written."""
        if len(bindings) != self.engine.num_io_tensors:
            return False
        for i, address in enumerate(bindings):
            self.set_tensor_address(self.engine.get_tensor_name(i), address)
        done = self.execute_async_v3(0)
        if self._pending is not None:
            self._pending.synchronize()
        return done

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Runs on a CUDA stream; on the CPU, with a profiler or with a listener to debug tensors, the outputs are written when it returns.

        False if an input or output has no address, if a kernel fails, or if the listener says so; the error goes to the logger.
        """
        inputs, outputs = self.engine.engine.inputs, self.engine.outputs
        missing = [n for n in (*inputs, *outputs) if n not in self._addresses and n not in self._allocators]
        if missing:
            self._report(f"'{missing[0]}' has no address: set_tensor_address", ErrorCodeTRT.INVALID_STATE)
            return False
        try:
            if self.profiler is not None:
                self._run_profiled(stream_handle)
            elif self._listener is not None and self._debugged and not self.engine.engine.backend.capabilities.host_memory:
                self._run_on_copies(stream_handle)
            elif self.engine.engine.backend.capabilities.host_memory:
                shapes = self._context.input_shapes()
                arrays = {n: make_array_at(self._addresses[n], shapes[n], t.dtype.numpy) for n, t in inputs.items()}
                self._write(self._context.run(arrays), stream_handle)
            else:
                self._enqueue(stream_handle)
        except WhetError as e:
            self._report(e, ErrorCodeTRT.FAILED_EXECUTION)
            return False
        return True

    def report_to_profiler(self) -> bool:
        """Reports the layer times of the last run to the profiler, where `enqueue_emits_profile` is False. False without times."""
        if self.profiler is None or not self._times:
            return False
        for name, ms in self._times:
            self.profiler.report_layer_time(name, ms)
        self._times = []
        return True

    def _run_on_copies(self, stream_handle: int) -> tuple[BoundEngine, list[float]]:
        """Runs layer by layer on copies of the inputs, and writes the outputs; the launches, and the seconds of each layer."""
        self._synchronize(stream_handle)
        plan, shapes = self.engine.engine.plan, self._context.input_shapes()
        bound = self._context.launches()
        inputs = self.engine.engine.inputs
        bound.feed({n: read_array(self._addresses[n], shapes[n], t.dtype.numpy, plan.backend) for n, t in inputs.items()})
        seconds = bound.run_timed()
        self._write(bound.fetch(), stream_handle)
        return bound, seconds

    def _run_profiled(self, stream_handle: int) -> None:
        """Runs layer by layer, and reports the times."""
        bound, seconds = self._run_on_copies(stream_handle)
        net = bound.shaped.plan.network
        names, suffix = display_names(net), profile_suffix(self._context.profile_index)
        self._times = [(names[x.name] + suffix, 1e3 * s) for x, s in zip(net.layers, seconds, strict=True)]
        if self.enqueue_emits_profile:
            self.report_to_profiler()

    def _write(self, results: dict[str, np.ndarray], stream_handle: int) -> None:
        """Copies outputs to the caller's memory, and shows debug tensors to the listener."""
        for name, array in results.items():
            if not name.startswith(DEBUG_PREFIX):
                write_array(self._output_address(name, array.shape, array.nbytes, stream_handle), array, self.engine.engine.backend)
        for name, t in self.engine.debug_tensors.items():
            if self._listener is not None and name in self._debugged:
                array = np.ascontiguousarray(results[DEBUG_PREFIX + name])
                about = (array.ctypes.data, TensorLocation.HOST, from_whet(t.dtype), array.shape, name, stream_handle)
                if not self._listener.process_debug_tensor(*about):
                    raise ContextError(f"the debug listener returned False for '{name}'")

    def _output_address(self, name: str, shape: tuple[int, ...], nbytes: int, stream_handle: int) -> int:
        """The address of an output: that of its allocator, which learns the shape, or the one that was set."""
        address, allocator = self._addresses.get(name, 0), self._allocators.get(name)
        if allocator is not None:
            address = allocator.reallocate_output_async(name, address, max(nbytes, 1), _ALIGNMENT, stream_handle)
            allocator.notify_shape(name, shape)
        return address

    def _enqueue(self, stream_handle: int) -> None:
        """Starts a run on a GPU; synchronous if the engine stores an input or output in another format than the caller."""
        engine, shapes = self.engine.engine, self._context.input_shapes() | self._context.output_shapes()
        for name, t in (engine.inputs | self.engine.outputs).items():
            shape, nbytes = tuple(shapes[name]), prod(shapes[name]) * t.dtype.bits // 8
            address = self._addresses[name] if name in engine.inputs else self._output_address(name, shape, nbytes, stream_handle)
            if self._bound.get(name) != (address, shape):
                array = DeviceArray(address, shape, t.dtype, engine.backend.device_number)
                self._copied[name] = bool(self._context.bind(name, array))
                self._bound[name] = (address, shape)
        if any(self._copied.values()):
            self._synchronize(stream_handle)
            self._context.execute()
            self._pending = None
        else:
            self._pending = self._context.enqueue(stream_handle)

    def _synchronize(self, stream_handle: int) -> None:
        """Waits for the work on a stream of the caller."""
        if not self.engine.engine.backend.capabilities.host_memory:
            from whet.backends.cuda.stream import Stream

            Stream.of(stream_handle).synchronize()

    def _report(self, error: object, code: ErrorCodeTRT) -> None:
        report_error(self.engine.logger, self.error_recorder or self.engine.error_recorder, error, code)

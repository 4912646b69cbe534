"""IExecutionContext: runs of an engine on memory that the caller names by address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from whet.errors import WhetError
from whet.runtime.memory import array_at
from whet.trt.errors import NotServedError
from whet.trt.handle import Handle

if TYPE_CHECKING:
    from whet.trt.runtime import ICudaEngine

_ALIGNMENT = 256  # bytes; what TensorRT asks output allocators for


class IOutputAllocator:
    """Base class of allocators of outputs: subclasses define `reallocate_output_async` and `notify_shape`."""

    def __init__(self) -> None:
        pass

    def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        """The address of at least `size` bytes for an output."""
        raise NotImplementedError("a subclass of IOutputAllocator defines reallocate_output_async")

    def notify_shape(self, tensor_name: str, shape: tuple[int, ...]) -> None:
        """Receives an output's shape before its values are written."""
        raise NotImplementedError("a subclass of IOutputAllocator defines notify_shape")


class IExecutionContext(Handle):
    """Runs an engine. Addresses are host addresses; the caller keeps the memory alive while it runs. Runs are synchronous."""

    def __init__(self, engine: ICudaEngine):
        self.engine = engine
        self.active_optimization_profile = 0
        self._context = engine.engine.create_context()
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Selects a profile; False for an unknown index. Input shapes are to be set again."""
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return False
        if profile_index != self.active_optimization_profile:
            self._context.close()
            self._context = self.engine.engine.create_context(profile_index)
            self.active_optimization_profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Sets an input's shape; False outside the profile."""
        try:
            self._context.set_input_shape(name, tuple(shape))
        except WhetError:
            return False
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or output for the current input shapes."""
        shapes = self._context.input_shapes()
        return tuple(shapes[name] if name in shapes else self._context.output_shapes()[name])

    def infer_shapes(self) -> list[str]:
        """Names of inputs without a shape: none, shapes start at the profile's opt shapes."""
        return []

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """Sets the address of an input or output; False for an unknown name or address 0."""
        if name not in (*self.engine.engine.inputs, *self.engine.engine.outputs) or not memory:
            return False
        self._addresses[name] = int(memory)
        return True

    def get_tensor_address(self, name: str) -> int:
        """The address of an input or output; 0 if it is not set."""
        return self._addresses.get(name, 0)

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        """Gives an output an allocator, which replaces its address; False for an unknown name."""
        if name not in self.engine.engine.outputs:
            return False
        self._allocators[name] = output_allocator
        return True

    def execute_v2(self, bindings: Sequence[int]) -> bool:
        """Runs with the addresses of inputs and outputs in the order of `get_tensor_name`."""
        if len(bindings) != self.engine.num_io_tensors:
            return False
        for i, address in enumerate(bindings):
            self.set_tensor_address(self.engine.get_tensor_name(i), address)
        return self.execute_async_v3(0)

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Runs; the outputs are written when it returns. False if an input or output has no address."""
        inputs, outputs = self.engine.engine.inputs, self.engine.engine.outputs
        if any(n not in self._addresses for n in inputs) or any(n not in self._addresses and n not in self._allocators for n in outputs):
            return False
        shapes = self._context.input_shapes()
        results = self._context.run({n: array_at(self._addresses[n], shapes[n], t.dtype.numpy) for n, t in inputs.items()})
        for name, array in results.items():
            address = self._addresses.get(name, 0)
            allocator = self._allocators.get(name)
            if allocator is not None:
                address = allocator.reallocate_output_async(name, address, max(array.nbytes, 1), _ALIGNMENT, stream_handle)
                allocator.notify_shape(name, array.shape)
            ctypes.memmove(address, array.tobytes(), array.nbytes)
        return True

    def __getattr__(self, name: str) -> object:
        if name in ("profiler", "set_debug_listener", "set_all_tensors_debug_state", "set_device_memory", "set_aux_streams"):
            raise NotServedError(f"IExecutionContext.{name}", "not implemented yet")
        raise AttributeError(f"IExecutionContext has no attribute {name!r}")

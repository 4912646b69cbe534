"""OrtValue and IOBinding: tensors in host or GPU memory that a session reads and writes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.backends import get_backend
from whet.errors import ContextError, ShapeError, UsageError
from whet.network import DTYPES, DType
from whet.runtime.dlpack import DeviceArray, on_gpu, to_device_array

if TYPE_CHECKING:
    from whet.ort.session import InferenceSession

TYPE_NAMES = {
    "f32": "float", "f64": "double", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "bool": "bool", "f8e4m3": "float8e4m3fn", "f8e5m2": "float8e5m2",
}  # fmt: skip
_ALIGNMENT = 256  # bytes, of memory on a GPU


def format_tensor_type(dtype: DType) -> str:
    """ONNX Runtime's name of a tensor's type: "tensor(float)"."""
    return f"tensor({TYPE_NAMES.get(dtype.name, dtype.name)})"


def _convert_element_type(element_type: Any) -> DType:
    """The type of a NumPy type. Raises UsageError for one that whet lacks."""
    wanted = np.dtype(element_type)
    found = next((d for d in DTYPES.values() if d.name in TYPE_NAMES and d.numpy == wanted), None)
    if found is None:
        raise UsageError(f"element_type: whet has no type for {wanted}")
    return found


class OrtValue:
    """A tensor in host memory (a NumPy array) or on a GPU."""

    def __init__(self, data: np.ndarray | DeviceArray):
        self._data = data

    @staticmethod
    def ortvalue_from_numpy(array: Any, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A value with a copy of `array` on a GPU, or over its own memory on the CPU."""
        array = np.ascontiguousarray(array)
        if _is_host(device_type):
            return OrtValue(array)
        value = OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, device_type, device_id)
        value.update_inplace(array)
        return value

    @staticmethod
    def ortvalue_from_shape_and_type(shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A value with zeros on the CPU, or with undefined contents on a GPU."""
        if _is_host(device_type):
            return OrtValue(np.zeros(tuple(shape), element_type))
        dtype, backend = _convert_element_type(element_type), get_backend("cuda")
        buffer = backend.allocate(max(prod(shape) * dtype.bits // 8, 1), _ALIGNMENT)
        return OrtValue(DeviceArray(buffer.address, tuple(shape), dtype, device_id, buffer))

    @staticmethod
    def from_dlpack(data: Any) -> OrtValue:
        """A value over the memory of a tensor of another library."""
        return OrtValue(to_device_array("data", data) if on_gpu(data) else np.from_dlpack(data))

    def numpy(self) -> np.ndarray:
        """The array of a host value, or a copy of a GPU's memory."""
        if isinstance(self._data, np.ndarray):
            return self._data
        raw = get_backend("cuda").read_address(self._data.address, self._data.nbytes)
        return raw.view(self._data.dtype.numpy).reshape(self._data.shape)

    def update_inplace(self, array: np.ndarray) -> None:
        """Overwrites the contents. Raises ShapeError for another shape or type."""
        array = np.ascontiguousarray(array)
        if tuple(array.shape) != tuple(self._data.shape) or array.dtype != self._numpy_type():
            raise ShapeError(f"array: {array.dtype}{list(array.shape)}, the value is {self._numpy_type()}{list(self._data.shape)}")
        if isinstance(self._data, np.ndarray):
            np.copyto(self._data, array)
        else:
            get_backend("cuda").write_address(self._data.address, array)

    def _numpy_type(self) -> np.dtype:
        return np.dtype(self._data.dtype if isinstance(self._data, np.ndarray) else self._data.dtype.numpy)

    def shape(self) -> list[int]:
        """The shape."""
        return list(self._data.shape)

    def data_type(self) -> str:
        """ "tensor(float)" and similar."""
        return format_tensor_type(_convert_element_type(self._numpy_type()))

    def device_name(self) -> str:
        """ "cpu" or "cuda"."""
        return "cpu" if isinstance(self._data, np.ndarray) else "cuda"

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._data.ctypes.data if isinstance(self._data, np.ndarray) else self._data.address

    def tensor_size_in_bytes(self) -> int:
        """The size of the contents in bytes."""
        return self._data.nbytes

    def is_tensor(self) -> bool:
        """Always True: whet has no sequences."""
        return True

    def has_value(self) -> bool:
        """Always True."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._data.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)


class IOBinding:
    """Inputs and outputs of runs by `InferenceSession.run_with_iobinding`, in memory that the caller chooses."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self._inputs: dict[str, OrtValue] = {}
        self._outputs: dict[str, OrtValue | str] = {}  # a value to write to, or the device of a new one
        self._results: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        """Binds a NumPy array."""
        self._inputs[self._input(name)] = OrtValue(np.asarray(array))

    def bind_input(self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int) -> None:
        """Binds memory at an address, which the caller keeps alive."""
        self._inputs[self._input(name)] = _make_value_at_address(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Binds a value."""
        self._inputs[self._input(name)] = ortvalue

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None, shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """Binds memory at an address, or without one asks for a new value on the device."""
        name = self._output(name)
        if buffer_ptr is None:
            self._outputs[name] = "cpu" if _is_host(device_type) else "cuda"
        elif element_type is None or shape is None:
            raise UsageError("buffer_ptr: an output at an address needs element_type and shape")
        else:
            self._outputs[name] = _make_value_at_address(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Binds a value that a run overwrites."""
        self._outputs[self._output(name)] = ortvalue

    def clear_binding_inputs(self) -> None:
        """Releases the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Releases the outputs."""
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Does nothing: runs are ordered after earlier work on the default stream."""

    def synchronize_outputs(self) -> None:
        """Does nothing: outputs are complete when a run returns."""

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order of binding."""
        return [self._results[n] for n in self._outputs if n in self._results]

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """The outputs of the last run as NumPy arrays, in the order of binding."""
        return [v.numpy() for v in self.get_outputs()]

    def feed(self) -> Mapping[str, Any]:
        """The bound inputs for a run. Raises ContextError if nothing is bound as an output."""
        if not self._outputs:
            raise ContextError("no output is bound: call bind_output(name) first")
        return {n: v._data for n, v in self._inputs.items()}

    def keep(self, outputs: Mapping[str, Any]) -> None:
        """Stores the outputs of a run as they were bound."""
        for name, bound in self._outputs.items():
            got = OrtValue(outputs[name])
            if isinstance(bound, OrtValue):
                bound.update_inplace(got.numpy())
                got = bound
            elif bound != got.device_name():
                got = OrtValue.ortvalue_from_numpy(got.numpy(), bound)
            self._results[name] = got

    def _input(self, name: str) -> str:
        return self._session.known(name, "input")

    def _output(self, name: str) -> str:
        return self._session.known(name, "output")


def _is_host(device_type: str) -> bool:
    """Raises UsageError for an unknown device."""
    if device_type not in ("cpu", "cuda", "gpu"):
        raise UsageError(f"device_type: {device_type!r} is none of cpu, cuda")
    return device_type == "cpu"


def _make_value_at_address(device_type: str, device_id: int, element_type: Any, shape: Sequence[int], address: int) -> OrtValue:
    dtype, sizes = _convert_element_type(element_type), tuple(int(d) for d in shape)
    if not _is_host(device_type):
        return OrtValue(DeviceArray(int(address), sizes, dtype, int(device_id)))
    memory = (ctypes.c_uint8 * (prod(sizes) * dtype.bits // 8)).from_address(int(address))
    return OrtValue(np.frombuffer(memoryview(memory), dtype.numpy).reshape(sizes))

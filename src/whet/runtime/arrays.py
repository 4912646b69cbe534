"""Users' arrays: NumPy and DLPack tensors on the host or a GPU, and the conditions under which kernels use their memory without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.backends import Backend
from whet.errors import ShapeError
from whet.network import DType
from whet.runtime.dlpack import CPU, DeviceArray, on_gpu, to_device_array
from whet.runtime.memory import ALIGNMENT

if TYPE_CHECKING:
    from whet.runtime.steps import BoundEngine


def as_array(name: str, value: Any, dtype: DType) -> np.ndarray:
    """`value` as an array over the same memory: an ndarray is returned unchanged, objects with `__dlpack__` are imported.

    Raises ShapeError for other objects and for an element type other than `dtype`.
    """
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as e:
            raise ShapeError(
                f"'{name}': this {type(value).__name__} cannot be read through DLPack on the host ({e}); copy it to the CPU first"
            ) from e
    else:
        raise ShapeError(f"'{name}' is a {type(value).__name__}; give a NumPy array or an object with __dlpack__ (torch.Tensor, ...)")
    if array.dtype != dtype.numpy:
        raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {dtype.numpy.name}: convert it with .astype('{dtype.numpy.name}')")
    return array


UserArray = np.ndarray | DeviceArray
_DEVICE_ALIGNMENT = 16  # bytes; required by vector accesses and bulk copies of GPU kernels


def as_user_array(name: str, value: Any, dtype: DType, backend: Backend) -> UserArray:
    """As `as_array`; a tensor on a GPU stays there if the backend is that GPU. Raises ShapeError."""
    if not on_gpu(value):
        return as_array(name, value, dtype)
    array = to_device_array(name, value)
    if backend.capabilities.dlpack_device == CPU:
        raise ShapeError(f"'{name}' is on a GPU, this engine runs on the backend '{backend.name}': copy it to the host first (.cpu())")
    if array.device != backend.device_number:
        raise ShapeError(f"'{name}' is on GPU {array.device}, this engine runs on GPU {backend.device_number}: copy it there first")
    if array.dtype != dtype:
        raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {dtype}: convert it first (torch: .to(torch.{dtype.numpy.name}))")
    return array


def get_address(array: UserArray) -> int:
    """The address of the first byte."""
    return array.address if isinstance(array, DeviceArray) else array.ctypes.data


def copy_in(bound: BoundEngine, name: str, array: UserArray) -> None:
    """Copies a user's array into a tensor in the arena; from a GPU through the host if the engine stores it in another format."""
    if isinstance(array, np.ndarray):
        bound.write(name, array)
    elif _is_stored_as_given(bound, name):
        bound.backend.copy_address(bound.address(name), array.address, array.nbytes)
    else:
        bound.write(name, on_host(bound, array))


def on_host(bound: BoundEngine, array: UserArray) -> np.ndarray:
    """The array itself, or a copy of one on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    return bound.backend.read_address(array.address, array.nbytes).view(array.dtype.numpy).reshape(array.shape)


def copy_out(bound: BoundEngine, name: str, array: UserArray) -> None:
    """Copies an output to a user's array."""
    if isinstance(array, np.ndarray):
        np.copyto(array, bound.output(name))
    elif _is_stored_as_given(bound, name):
        bound.backend.copy_address(array.address, bound.address(name), array.nbytes)
    else:
        bound.backend.write_address(array.address, bound.output(name))


def _is_stored_as_given(bound: BoundEngine, name: str) -> bool:
    o = bound.shaped.operands.get(name)
    return o is not None and o.format == "linear" and o.dtype == bound.shaped.types[name].dtype


def explain_copy(bound: BoundEngine, name: str, array: UserArray, users: Mapping[str, UserArray]) -> str | None:
    """Reason why kernels cannot use a user's array as the tensor `name`; None if they can."""
    if isinstance(array, DeviceArray):
        if array.address % _DEVICE_ALIGNMENT:
            return f"its first byte is not {_DEVICE_ALIGNMENT}-byte aligned"
        if array.nbytes == 0:
            return "it is empty"
        if not _is_stored_as_given(bound, name):
            return f"the engine stores %{name} as {bound.shaped.operands.get(name)}; it goes through the host"
        for other, theirs in users.items():
            begin, end = get_address(theirs), get_address(theirs) + theirs.nbytes
            if other != name and isinstance(theirs, DeviceArray) and begin < array.address + array.nbytes and array.address < end:
                return f"it shares memory with the array of '{other}'"
        return bound.explain_unbindable(name)
    if bound.arena.array is None:
        return "the backend's memory is not the host's"
    if not array.flags.c_contiguous:
        return "it is not C-contiguous"
    if array.ctypes.data % ALIGNMENT:
        return f"its first byte is not {ALIGNMENT}-byte aligned (context.input_array and output_array make such arrays)"
    if array.nbytes == 0:
        return "it is empty"
    o = bound.shaped.operands.get(name)
    if o is None or o.format != "linear" or o.dtype != bound.shaped.types[name].dtype:
        return f"the engine stores %{name} as {o}"
    for other, theirs in users.items():
        if other != name and isinstance(theirs, np.ndarray) and np.may_share_memory(array, theirs):
            return f"it shares memory with the array of '{other}'"
    return bound.explain_unbindable(name)

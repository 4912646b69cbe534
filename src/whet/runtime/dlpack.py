"""DLPack through ctypes: imports tensors on a GPU and exports whet's memory as tensors, without copies or another library.

The structures are those of dlpack.h (version 0, the capsule named "dltensor"), https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from typing import Any

from whet.errors import ShapeError
from whet.network import BF16, DTYPES, DType

CPU, CUDA = 1, 2  # device types
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class ManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(ManagedTensor))
ManagedTensor._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))
python_api = ctypes.pythonapi
python_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
python_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
python_api.PyCapsule_New.restype = ctypes.py_object
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
python_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)
python_api.PyCapsule_IsValid.restype = ctypes.c_int
python_api.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", python_api))
exported: dict[int, Any] = {}  # address of the structure -> objects that an exported tensor keeps alive


@dataclass(frozen=True)
class DeviceArray:
    """A row-major array in a GPU's memory. torch.from_dlpack(array), cupy.from_dlpack(array), ... share its memory."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    device: int = 0
    owner: Any = None  # keeps the memory alive

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.bits // 8

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """A capsule. Its contents are complete after `execute`; after `enqueue` the caller orders its reads by the stream."""
        managed = ManagedTensor()
        sizes = (ctypes.c_int64 * max(len(self.shape), 1))(*self.shape)
        kind = "bfloat" if self.dtype == BF16 else self.dtype.kind
        managed.tensor = _Tensor(self.address, CUDA, self.device, len(self.shape), _CODES[kind], self.dtype.bits, 1, sizes, None, 0)
        address = ctypes.addressof(managed)
        managed.deleter = _forget
        exported[address] = (managed, sizes, self.owner)
        return python_api.PyCapsule_New(address, b"dltensor", _destroy)


@_DESTRUCTOR
def _destroy(capsule: int) -> None:
    """Destructor of a capsule that was never consumed (consumers rename a capsule)."""
    if python_api.PyCapsule_IsValid(capsule, b"dltensor"):
        exported.pop(_raw_pointer(capsule, b"dltensor"), None)


@_DELETER
def _forget(managed: Any) -> None:
    exported.pop(ctypes.addressof(managed.contents), None)


def on_gpu(value: Any) -> bool:
    """True if an object reports that its memory is on a GPU."""
    query = getattr(value, "__dlpack_device__", None)
    return query is not None and int(query()[0]) == CUDA


def to_device_array(name: str, value: Any) -> DeviceArray:
    """The memory of a tensor on a GPU. Raises ShapeError if it is not row-major or has an unsupported element type."""
    if isinstance(value, DeviceArray):
        return value
    capsule = value.__dlpack__(stream=-1)  # -1: no synchronization; the caller orders the run
    t = ctypes.cast(python_api.PyCapsule_GetPointer(capsule, b"dltensor"), ctypes.POINTER(ManagedTensor)).contents.tensor
    shape = tuple(int(t.shape[i]) for i in range(t.ndim))
    if t.strides:
        steps, want = [int(t.strides[i]) for i in range(t.ndim)], [prod(shape[i + 1 :]) for i in range(t.ndim)]
        if any(s != w for s, w, d in zip(steps, want, shape, strict=True) if d > 1):
            raise ShapeError(f"'{name}': the tensor of shape {list(shape)} has strides {steps}; row-major ones are needed: call .contiguous() on it")
    word = {0: "i", 1: "u", 2: "f", 4: "bf"}.get(t.code)
    dtype = DTYPES.get("bool" if t.code == 6 else f"{word}{t.bits}")
    if dtype is None or t.lanes != 1:
        raise ShapeError(f"'{name}': whet has no element type for DLPack's code {t.code} with {t.bits} bits x{t.lanes}")
    return DeviceArray(int(t.data or 0) + int(t.byte_offset), shape, dtype, int(t.device_id), (value, capsule))

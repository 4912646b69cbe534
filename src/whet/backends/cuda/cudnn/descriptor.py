"""The descriptor, the only object type of cuDNN's graph API: attributes are set, it is finalized, then attributes can be read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from whet.backends.cuda.cudnn import numbers as n
from whet.backends.cuda.cudnn.library import check, require_library

_C: dict[int, Any] = {
    n.T_INT64: ctypes.c_int64, n.T_FLOAT: ctypes.c_float, n.T_DOUBLE: ctypes.c_double, n.T_BOOL: ctypes.c_bool, n.T_POINTER: ctypes.c_void_p,
    n.T_HANDLE: ctypes.c_void_p, n.T_DESCRIPTOR: ctypes.c_void_p, n.T_CHAR: ctypes.c_char,
}  # fmt: skip


class Descriptor:
    """Owns a backend descriptor and keeps the descriptors in its attributes alive. A failed call raises CudnnError, which names the `subject`."""

    def __init__(self, kind: int, subject: str) -> None:
        self._lib, self._what = require_library(), subject
        self._kept: list[Any] = []
        self.handle = ctypes.c_void_p()
        check(self._lib.cudnnBackendCreateDescriptor(ctypes.c_int(kind), ctypes.byref(self.handle)), subject)

    def set(self, attribute: int, kind: int, *values: Any) -> Descriptor:
        """Sets an attribute to values of an attribute type; descriptors are passed as Descriptor objects."""
        plain = [v.handle.value if isinstance(v, Descriptor) else v for v in values]
        self._kept += [v for v in values if isinstance(v, Descriptor)]
        array = (_C.get(kind, ctypes.c_int) * len(plain))(*plain)
        check(self._lib.cudnnBackendSetAttribute(self.handle, attribute, kind, len(plain), array), f"{self._what}, attribute {attribute}")
        return self

    def finalize(self) -> Descriptor:
        """Finalizes the descriptor: the library checks its attributes."""
        check(self._lib.cudnnBackendFinalize(self.handle), self._what)
        return self

    def get(self, attribute: int, kind: int, most: int = 1) -> list[Any]:
        """Up to `most` values of an attribute."""
        array, count = (_C.get(kind, ctypes.c_int) * most)(), ctypes.c_int64()
        found = self._lib.cudnnBackendGetAttribute(self.handle, attribute, kind, most, ctypes.byref(count), array)
        check(found, f"{self._what}, attribute {attribute}")
        return list(array[: min(most, count.value)])

    def get_descriptors(self, attribute: int, kind: int, subject: str, most: int = 1) -> list[Descriptor]:
        """Up to `most` descriptors of one kind from an attribute."""
        descriptors = [Descriptor(kind, subject) for _ in range(most)]
        array, count = (ctypes.c_void_p * most)(*(d.handle.value for d in descriptors)), ctypes.c_int64()
        status = self._lib.cudnnBackendGetAttribute(self.handle, attribute, n.T_DESCRIPTOR, most, ctypes.byref(count), array)
        check(status, f"{self._what}, attribute {attribute}")
        for d in descriptors:
            d._kept.append(self)
        return descriptors[: min(most, count.value)]

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.cudnnBackendDestroyDescriptor(self.handle)


def make_descriptor(kind: int, fields: str, *attributes: tuple[int, int, Sequence[Any]]) -> Descriptor:
    """A finalized descriptor with (attribute, type, values) set."""
    descriptor = Descriptor(kind, fields)
    for attribute, type_, values in attributes:
        descriptor.set(attribute, type_, *values)
    return descriptor.finalize()

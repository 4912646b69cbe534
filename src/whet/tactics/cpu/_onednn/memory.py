"""Memory descriptors: shape, element type and layout of one operand, and aligned buffers and packing through a reorder."""

from __future__ import annotations

import ctypes as C
import math
import weakref
from collections.abc import Sequence

import numpy as np

from whet.errors import BackendError
from whet.tactics.cpu._onednn.library import dims_array, library

#: dnnl_data_type_t by whet's names
DTYPES = {"f16": 1, "bf16": 2, "f32": 3, "i32": 4, "i8": 5, "u8": 6}
_NAMES = {v: k for k, v in DTYPES.items()}
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "i32": 32, "i8": 8, "u8": 8}
_ANY = 1
#: dnnl_format_tag_t of the blocked formats by rank (nCw, nChw, nCdhw)
_BLOCKED = {"nChw16c": {3: 56, 4: 78, 5: 121}, "nChw8c": {3: 69, 4: 102, 5: 142}}
_Q_NDIMS, _Q_DIMS, _Q_TYPE, _Q_STRIDES = 256, 257, 258, 14
ALIGNMENT = 64


class MemoryDesc:
    """An owned dnnl_memory_desc_t; immutable, freed with the object."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._free = weakref.finalize(self, library().lib.dnnl_memory_desc_destroy, handle)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer in this layout, padding included; 0 for an absent operand."""
        return int(library().lib.dnnl_memory_desc_get_size(self.handle))

    @property
    def dims(self) -> tuple[int, ...]:
        """The logical shape."""
        count, values = C.c_int(), C.POINTER(C.c_int64)()
        library().call("memory_desc_query", self.handle, _Q_NDIMS, C.byref(count))
        if not count.value:
            return ()
        library().call("memory_desc_query", self.handle, _Q_DIMS, C.byref(values))
        return tuple(values[i] for i in range(count.value))

    @property
    def dtype(self) -> str:
        """whet's name of the element type."""
        code = C.c_int()
        library().call("memory_desc_query", self.handle, _Q_TYPE, C.byref(code))
        return _NAMES[code.value]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryDesc) and bool(library().lib.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major array (1 where an axis is empty)."""
    return tuple(math.prod(max(d, 1) for d in shape[i + 1 :]) for i in range(len(shape)))


def describe(shape: Sequence[int], dtype: str, fmt: str = "linear", strides: Sequence[int] | None = None) -> MemoryDesc:
    """A descriptor of `shape` in a format of whet (linear, nhwc, nChw8c, nChw16c), with explicit strides, or `any` (oneDNN chooses).

    Scalars become shape (1,). Raises BackendError for more than 12 axes or a type that oneDNN has not.
    """
    shape = tuple(shape) or (1,)
    if len(shape) > 12 or dtype not in DTYPES:
        raise BackendError(f"oneDNN holds no {dtype} tensor of rank {len(shape)}; types: {', '.join(DTYPES)}; rank: at most 12.")
    lib, code, dims = library(), DTYPES[dtype], dims_array(shape)
    if strides is None and fmt in ("any", *_BLOCKED):
        tag = _ANY if fmt == "any" else _BLOCKED[fmt].get(len(shape))
        if tag is None:
            raise BackendError(f"format {fmt} holds no tensor of rank {len(shape)}")
        return MemoryDesc(lib.make("memory_desc_create_with_tag", len(shape), dims, code, tag))
    if strides is None:
        strides = row_major(shape)
        if fmt == "nhwc":
            last = row_major((shape[0], *shape[2:], shape[1]))
            strides = (last[0], last[-1], *last[1:-1])
        elif fmt != "linear":
            raise BackendError(f"oneDNN tactics know no format {fmt!r}")
    return MemoryDesc(lib.make("memory_desc_create_with_strides", len(shape), dims, code, dims_array(tuple(strides))))


def borrowed(handle: int | None) -> MemoryDesc:
    """An own copy of a descriptor that a primitive descriptor lends."""
    if not handle:
        raise BackendError("oneDNN returned no memory descriptor for an operand that the primitive has")
    return MemoryDesc(library().make("memory_desc_clone", handle))


def aligned(nbytes: int) -> np.ndarray:
    """A zeroed uint8 buffer of `nbytes` whose address is a multiple of 64."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]

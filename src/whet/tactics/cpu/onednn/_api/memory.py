"""Memory descriptors: shape, element type and layout of one operand, and aligned buffers and packing through a reorder."""

from __future__ import annotations

import ctypes as C
import math
import weakref
from collections.abc import Sequence

import numpy as np

from whet.errors import BackendError
from whet.tactics.cpu.onednn._api.library import load_library, make_dims_array

#: dnnl_data_type_t by whet's names
DTYPES = {"f16": 1, "bf16": 2, "f32": 3, "i32": 4, "i8": 5, "u8": 6}
_NAMES = {v: k for k, v in DTYPES.items()}
_ANY = 1
#: dnnl_format_tag_t of the blocked formats by rank (nCw, nChw, nCdhw)
_BLOCKED = {"nChw16c": {3: 56, 4: 78, 5: 121}, "nChw8c": {3: 69, 4: 102, 5: 142}}
_Q_NDIMS, _Q_DIMS, _Q_TYPE, _Q_STRIDES, _Q_PADDED, _Q_KIND = 256, 257, 258, 14, 260, 262
_Q_NBLOCKS, _Q_BLOCKS, _Q_BLOCK_AXES, _BLOCKED_KIND = 263, 264, 265, 2
ALIGNMENT = 64


class MemoryDesc:
    """An owned dnnl_memory_desc_t; immutable, freed with the object. `text` says shape, type and layout: equal texts, equal layouts."""

    def __init__(self, handle: int, text: str) -> None:
        self.handle, self.text = handle, text
        self._free = weakref.finalize(self, load_library().lib.dnnl_memory_desc_destroy, handle)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer in this layout, padding included; 0 for an absent operand."""
        return int(load_library().lib.dnnl_memory_desc_get_size(self.handle))

    @property
    def dims(self) -> tuple[int, ...]:
        """The logical shape."""
        count, values = C.c_int(), C.POINTER(C.c_int64)()
        load_library().call("memory_desc_query", self.handle, _Q_NDIMS, C.byref(count))
        if not count.value:
            return ()
        load_library().call("memory_desc_query", self.handle, _Q_DIMS, C.byref(values))
        return tuple(values[i] for i in range(count.value))

    @property
    def dtype(self) -> str:
        """whet's name of the element type."""
        code = C.c_int()
        load_library().call("memory_desc_query", self.handle, _Q_TYPE, C.byref(code))
        return _NAMES[code.value]

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryDesc) and bool(load_library().lib.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]  # object's method becomes None: Python's way to make a class unhashable


def compute_row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major array (1 for empty axes)."""
    return tuple(math.prod(max(d, 1) for d in shape[i + 1 :]) for i in range(len(shape)))


def describe(shape: Sequence[int], dtype: str, fmt: str = "linear", strides: Sequence[int] | None = None) -> MemoryDesc:
    """A descriptor of `shape` in a format of whet (linear, nhwc, nChw8c, nChw16c), with explicit strides, or `any` (oneDNN chooses).

    Scalars become shape (1,). Raises BackendError for more than 12 axes or a type that oneDNN does not have.
    """
    shape = tuple(shape) or (1,)
    if len(shape) > 12 or dtype not in DTYPES:
        raise BackendError(f"oneDNN holds no {dtype} tensor of rank {len(shape)}; types: {', '.join(DTYPES)}; rank: at most 12.")
    lib, code, dims = load_library(), DTYPES[dtype], make_dims_array(shape)
    if strides is None and fmt in ("any", *_BLOCKED):
        tag = _ANY if fmt == "any" else _BLOCKED[fmt].get(len(shape))
        if tag is None:
            raise BackendError(f"format {fmt} holds no tensor of rank {len(shape)}")
        return MemoryDesc(lib.make("memory_desc_create_with_tag", len(shape), dims, code, tag), f"{dtype}{list(shape)}:{fmt}")
    if strides is None:
        strides = compute_row_major_strides(shape)
        if fmt == "nhwc":
            last = compute_row_major_strides((shape[0], *shape[2:], shape[1]))
            strides = (last[0], last[-1], *last[1:-1])
        elif fmt != "linear":
            raise BackendError(f"oneDNN tactics know no format {fmt!r}")
    handle = lib.make("memory_desc_create_with_strides", len(shape), dims, code, make_dims_array(tuple(strides)))
    return MemoryDesc(handle, f"{dtype}{list(shape)}:{list(strides)}")


def copy_borrowed(handle: int | None, origin: str, extra: str = "") -> MemoryDesc:
    """A copy of a descriptor that belongs to a primitive descriptor; `origin` names that one, for layouts that cannot be described.

    Integer weights may have compensation sums after their elements, which no query reports: `extra` has the parameters they depend on.
    """
    if not handle:
        raise BackendError("oneDNN returned no memory descriptor for an operand that the primitive has")
    copy = MemoryDesc(load_library().make("memory_desc_clone", handle), _describe_layout(handle) or origin)
    if extra and copy.dtype == "i8" and copy.nbytes > _count_dense_bytes(handle):
        copy.text += f" and {copy.nbytes - _count_dense_bytes(handle)} bytes for {extra}"
    return copy


def _count_dense_bytes(handle: int) -> int:
    """Bytes of the elements of an 8-bit layout, padding included."""
    values, ndims = C.POINTER(C.c_int64)(), C.c_int()
    load_library().call("memory_desc_query", handle, _Q_NDIMS, C.byref(ndims))
    load_library().call("memory_desc_query", handle, _Q_PADDED, C.byref(values))
    return math.prod(values[i] for i in range(ndims.value))


def _describe_layout(handle: int) -> str | None:
    """Type, shape, padded shape, strides and inner blocks as text; None for an opaque layout."""
    kind, ndims, code, count = (C.c_int() for _ in range(4))
    query = load_library().call
    query("memory_desc_query", handle, _Q_KIND, C.byref(kind))
    if kind.value != _BLOCKED_KIND:
        return None
    for what, out in ((_Q_NDIMS, ndims), (_Q_TYPE, code), (_Q_NBLOCKS, count)):
        query("memory_desc_query", handle, what, C.byref(out))
    parts = []
    for what, length in ((_Q_DIMS, ndims), (_Q_PADDED, ndims), (_Q_STRIDES, ndims), (_Q_BLOCKS, count), (_Q_BLOCK_AXES, count)):
        values = C.POINTER(C.c_int64)()
        if length.value:
            query("memory_desc_query", handle, what, C.byref(values))
        parts.append(str([values[i] for i in range(length.value)]))
    return f"{_NAMES.get(code.value, code.value)}" + "".join(parts)


def allocate_aligned(nbytes: int) -> np.ndarray:
    """A zeroed uint8 buffer of `nbytes` whose address is a multiple of 64."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]

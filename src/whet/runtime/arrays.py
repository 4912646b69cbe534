"""Users' arrays: NumPy and DLPack in, and whether kernels can use their memory as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import ShapeError
from whet.network import DType
from whet.runtime.memory import ALIGNMENT

if TYPE_CHECKING:
    from whet.runtime.steps import Bound


def as_array(name: str, value: Any, dtype: DType) -> np.ndarray:
    """`value` as an array over the same memory: an ndarray itself, anything with `__dlpack__` by DLPack.

    Raises ShapeError when it is neither, or of another element type than `dtype`.
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


def why_copied(bound: Bound, name: str, array: np.ndarray, users: Mapping[str, np.ndarray]) -> str | None:
    """Why kernels cannot use a user's array in place of the tensor `name`; None when they can."""
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
        if other != name and np.may_share_memory(array, theirs):
            return f"it shares memory with the array of '{other}'"
    return bound.why_not_pointed(name)

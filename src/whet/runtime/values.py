"""Tensors in an arena: offsets, checked against the plan, and values as logical arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from whet.backends import Backend, Buffer
from whet.engine.plan import ArenaPlan
from whet.errors import EngineError, ShapeError
from whet.network import Network, Tensor, compute_stored_shape, format_bytes, from_stored, static_shape, to_stored
from whet.runtime.memory import ALIGNMENT, read_bytes, write_bytes
from whet.runtime.shaped import ShapedPlan

_LARGE = 1 << 22  # bytes from which several threads change the layout of samples
View = tuple[str, np.ndarray, tuple[int, ...], np.dtype]  # name, array, its shape and type


class Values:
    """The tensors of an engine at actual shapes, in `arena` (by default their own).

    Raises EngineError for a tensor without memory in the arena, or with an allocation that is too small or out of bounds.
    """

    def __init__(self, shaped: ShapedPlan, backend: Backend, arena: Buffer | None = None):
        self.shaped, self.backend = shaped, backend
        self.network: Network = shaped.plan.network
        self.arena_plan: ArenaPlan = shaped.plan.arenas[shaped.profile]
        self.arena = arena if arena is not None else allocate_arena(self.arena_plan, backend)
        self._base = {name: self._check(name) for name in shaped.operands}
        self._views: dict[str, np.ndarray | None] = {}  # see _view

    def feed(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies inputs into the arena, in the stored format. Raises ShapeError for a missing or unsuitable one."""
        for t in self.network.inputs:
            if t.name not in arrays:
                raise ShapeError(f"input '{t.name}' is missing; the engine takes {', '.join(i.name for i in self.network.inputs)}")
            a = arrays[t.name]
            self.write(t.name, a if type(a) is np.ndarray else np.asarray(a))

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs, in the network's own types."""
        return {t.name: self._copy_output(t) for t in self.network.outputs}

    def output(self, name: str) -> np.ndarray:
        """A copy of one output, in the network's own type."""
        return self._copy_output(next(t for t in self.network.outputs if t.name == name))

    def _copy_output(self, t: Tensor) -> np.ndarray:
        if t.is_constant:
            return t.array().copy()
        view = self._view(t.name)
        return view.copy() if view is not None else self.value(t.name).astype(t.dtype.numpy, copy=False)

    def value(self, name: str) -> np.ndarray:
        """A copy of a tensor's current contents, as a logical array of its storage type (valid during the tensor's lifetime)."""
        return np.array(self._read(name, 0, None), order="C")

    def samples(self, name: str, at: Sequence[int], block: int = 1) -> np.ndarray:
        """As `value`, for the blocks `at` of the first axis only; that axis is outermost in every format, so nothing else is read."""
        parts = [self._read(name, i * block, block) for i in at]
        found = np.empty((len(at) * block, *parts[0].shape[1:]), parts[0].dtype)

        def fill(i: int) -> None:
            found[i * block : (i + 1) * block] = parts[i]

        if found.nbytes < _LARGE or len(at) == 1:
            for i in range(len(at)):
                fill(i)
            return found
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(at), thread_name_prefix="samples") as pool:  # a change of layout takes longer than the copy from a GPU
            list(pool.map(fill, range(len(at))))
        return found

    def place(self, name: str) -> tuple[int, int]:
        """Offset in the arena and bytes of a tensor."""
        return self._base[name], self._nbytes(name)

    def _read(self, name: str, first: int, count: int | None) -> np.ndarray:
        """`count` entries of the first axis from `first` on (None: all) as a logical view of host memory, or of a copy of device memory."""
        o, shape = self.shaped.operands[name], static_shape(self.shaped.types[name].shape)
        at, nbytes = self.place(name)
        if count is not None:
            each = nbytes // shape[0]
            at, nbytes, shape = at + first * each, count * each, (count, *shape[1:])
        stored = static_shape(compute_stored_shape(o.format, shape))
        raw = read_bytes(self.backend, self.arena, at, nbytes)
        return from_stored(raw.view(o.dtype.numpy).reshape(stored), o.format, shape)

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a logical array to a tensor. Raises ShapeError for another shape or type."""
        view = self._view(name)
        if view is not None and array.shape == view.shape and array.dtype == view.dtype:
            view[...] = array
            return
        type_, o = self.shaped.types[name], self.shaped.operands[name]
        if array.shape != static_shape(type_.shape):
            raise ShapeError(f"'{name}' has shape {list(array.shape)}, this context is set to {type_}")
        if array.dtype != type_.dtype.numpy:
            raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {type_.dtype.numpy.name}: convert it with .astype(...)")
        if o.format == "linear" and o.dtype == type_.dtype:
            write_bytes(self.backend, self.arena, self._base[name], array)
        else:
            write_bytes(self.backend, self.arena, self._base[name], to_stored(array.astype(o.dtype.numpy, copy=False), o.format))

    def _view(self, name: str) -> np.ndarray | None:
        """The tensor's memory as an array, if it is row-major host memory of the tensor's own type. Created once: calls of small networks take
        microseconds."""
        if name not in self._views:
            t, o = self.shaped.types[name], self.shaped.operands.get(name)
            is_plain = o is not None and o.format == "linear" and o.dtype == t.dtype and self._nbytes(name) == t.dtype.numpy.itemsize * prod(
                static_shape(t.shape)
            )
            if is_plain and self.arena.array is not None:
                at, nbytes = self.place(name)
                raw = self.arena.array.reshape(-1).view(np.uint8)[at : at + nbytes]
                self._views[name] = raw.view(t.dtype.numpy).reshape(static_shape(t.shape))
            else:
                self._views[name] = None
        return self._views[name]

    def list_views(self) -> tuple[list[View], list[View]] | None:
        """The memory of the inputs and that of the outputs as arrays; None if one of them is stored in another form."""
        ins, outs = (
            [(t.name, None if t.is_constant else self._view(t.name)) for t in tensors] for tensors in (self.network.inputs, self.network.outputs)
        )
        if any(view is None for _, view in (*ins, *outs)):
            return None
        return tuple([(name, v, v.shape, v.dtype) for name, v in group if v is not None] for group in (ins, outs))  # type: ignore[return-value]  # two

    def write_stored(self, name: str, array: np.ndarray) -> None:
        """Writes a logical array of a tensor's storage type to the tensor, without conversion."""
        write_bytes(self.backend, self.arena, self._base[name], to_stored(array, self.shaped.operands[name].format))

    def address(self, name: str) -> int:
        """Address of a tensor in the arena."""
        return self.arena.address + self._base[name]

    def _nbytes(self, name: str) -> int:
        t, o = self.shaped.types[name], self.shaped.operands[name]
        return int(format_bytes(t.with_dtype(o.dtype), o.format))  # type: ignore[arg-type]  # the shapes are static here

    def _check(self, name: str) -> int:
        plan = self.arena_plan
        if name not in plan.offsets:
            raise EngineError(f"%{name} has no memory in the arena: the engine is incomplete")
        at, size = plan.offsets[name], self._nbytes(name)
        if size > plan.sizes.get(name, 0) or at < 0 or at + size > self.arena.nbytes:
            raise EngineError(f"%{name} needs {size} bytes at {at}; its allocation has {plan.sizes.get(name, 0)}, the arena {self.arena.nbytes}")
        return at


def allocate_arena(plan: ArenaPlan, backend: Backend) -> Buffer:
    """Zeroed memory for an arena (host pages are mapped on first access)."""
    return backend.allocate(max(plan.total, 1), ALIGNMENT)

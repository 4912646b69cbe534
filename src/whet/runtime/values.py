"""Tensors in an arena: offsets, checked against the plan, and values as logical arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whet.backends import Backend, Buffer
from whet.engine.plan import ArenaPlan
from whet.errors import EngineError, ShapeError
from whet.network import Network, Tensor, format_bytes, from_stored, static_shape, stored_shape, to_stored
from whet.runtime.memory import ALIGNMENT, read_bytes, write_bytes
from whet.runtime.shaped import ShapedPlan


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

    def feed(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copies inputs into the arena, in the stored format. Raises ShapeError for a missing or unsuitable one."""
        for t in self.network.inputs:
            if t.name not in arrays:
                raise ShapeError(f"input '{t.name}' is missing; the engine takes {', '.join(i.name for i in self.network.inputs)}")
            self.write(t.name, np.asarray(arrays[t.name]))

    def fetch(self) -> dict[str, np.ndarray]:
        """Copies of the outputs, in the network's own types."""
        return {t.name: self._copy_output(t) for t in self.network.outputs}

    def output(self, name: str) -> np.ndarray:
        """A copy of one output, in the network's own type."""
        return self._copy_output(next(t for t in self.network.outputs if t.name == name))

    def _copy_output(self, t: Tensor) -> np.ndarray:
        return t.array().copy() if t.is_constant else self.value(t.name).astype(t.dtype.numpy, copy=False)

    def value(self, name: str) -> np.ndarray:
        """A copy of a tensor's current contents, as a logical array of its storage type (valid during the tensor's lifetime)."""
        return self._read(name, 0, None)

    def samples(self, name: str, at: Sequence[int], block: int = 1) -> np.ndarray:
        """As `value`, for the blocks `at` of the first axis only; that axis is outermost in every format, so nothing else is read."""
        return np.concatenate([self._read(name, i * block, block) for i in at])

    def place(self, name: str) -> tuple[int, int]:
        """Offset in the arena and bytes of a tensor."""
        return self._base[name], self._nbytes(name)

    def _read(self, name: str, first: int, count: int | None) -> np.ndarray:
        o, shape = self.shaped.operands[name], static_shape(self.shaped.types[name].shape)
        at, nbytes = self.place(name)
        if count is not None:
            each = nbytes // shape[0]
            at, nbytes, shape = at + first * each, count * each, (count, *shape[1:])
        stored = static_shape(stored_shape(o.format, shape))
        raw = read_bytes(self.backend, self.arena, at, nbytes)
        return np.array(from_stored(raw.view(o.dtype.numpy).reshape(stored), o.format, shape), order="C")

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes a logical array to a tensor. Raises ShapeError for another shape or type."""
        type_, o = self.shaped.types[name], self.shaped.operands[name]
        if array.shape != static_shape(type_.shape):
            raise ShapeError(f"'{name}' has shape {list(array.shape)}, this context is set to {type_}")
        if array.dtype != type_.dtype.numpy:
            raise ShapeError(f"'{name}' is {array.dtype}, the engine takes {type_.dtype.numpy.name}: convert it with .astype(...)")
        if o.format == "linear" and o.dtype == type_.dtype:
            write_bytes(self.backend, self.arena, self._base[name], array)
        else:
            write_bytes(self.backend, self.arena, self._base[name], to_stored(array.astype(o.dtype.numpy, copy=False), o.format))

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

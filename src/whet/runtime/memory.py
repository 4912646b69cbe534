"""Memory of the runtime: arenas, and the weights shared by all contexts of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import ml_dtypes
import numpy as np

from whet.backends import Backend, Buffer
from whet.backends.cpu.memory import make_array_at as make_array_at
from whet.errors import BackendError
from whet.forks import make_lock
from whet.network import DType, Weight, compute_stored_shape, static_shape, to_stored
from whet.tactics import Operand, Packed

_STEPS_AHEAD = 8
Task = TypeVar("Task")
ALIGNMENT = 64  # bytes; a cache line, and the alignment of vector loads and stores


def align_size(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def allocate_aligned_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialized 64-byte aligned array, which `Context.bind` accepts without copying."""
    dtype = np.dtype(dtype)
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def read_bytes(backend: Backend, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
    """Bytes of backend memory: a view of host memory, a copy of device memory."""
    if buffer.array is not None:
        return buffer.array.reshape(-1).view(np.uint8)[offset : offset + nbytes]
    return backend.read(buffer, offset, nbytes)


def write_bytes(backend: Backend, buffer: Buffer, offset: int, data: np.ndarray) -> None:
    """Copies the bytes of `data` (C order) into backend memory."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if buffer.array is not None:
        buffer.array.reshape(-1).view(np.uint8)[offset : offset + flat.nbytes] = flat
    else:
        backend.write(buffer, offset, flat)


def _round_to_storage(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The array in a storage type. Finite values beyond its range become its largest: masks of -3.4e38 must not make rows of NaN in F16."""
    if array.dtype == dtype.numpy:
        return array
    with np.errstate(over="ignore"):
        rounded = array.astype(dtype.numpy)
    if dtype.is_float and array.dtype.kind == "f":
        beyond = np.isinf(rounded.astype(np.float32)) & np.isfinite(array)
        if beyond.any():
            rounded[beyond] = np.where(array[beyond] > 0, 1, -1) * float(ml_dtypes.finfo(dtype.numpy).max)
    return rounded


class Shared:
    """A buffer that is freed with its last user: contexts hold references, the store a weak one."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer

    @property
    def address(self) -> int:
        return self.buffer.address


class WeightStore:
    """Packed weights and constants in backend memory, one copy each for all contexts and shapes of an engine."""

    def __init__(self, backend: Backend, prepacked: Mapping[str, np.ndarray] | None = None):
        """`prepacked` has packed weights by key that need not be packed again (from an engine file)."""
        self.backend, self._prepacked = backend, prepacked or {}
        self.used_prepacked = False  # True once one of them is used
        self._held: WeakValueDictionary[str, Shared] = WeakValueDictionary()
        self._lock = make_lock()

    def forget_prepacked(self) -> None:
        """Packs all further weights again: the probe has tested only those that are in use now."""
        self._prepacked = {}

    def read_prepacked(self, weight: Packed) -> bool:
        """True if a packed weight need not be packed: it is held, or it is in the engine file, which is then read."""
        return f"packed {weight.key}" in self._held or (weight.storable and self._prepacked.get(weight.key) is not None)

    def packed(self, weight: Packed) -> Shared:
        """The buffer of a packed weight, shared by all users of its key."""

        def create() -> np.ndarray:
            got = self._prepacked.get(weight.key) if weight.storable else None
            if got is None or got.nbytes != weight.nbytes:
                got = weight.make()
            else:
                self.used_prepacked = True
            if got.nbytes != weight.nbytes:
                raise BackendError(f"a packed weight has {got.nbytes} bytes instead of the planned {weight.nbytes}..")
            return got

        return self._get(f"packed {weight.key}", weight.nbytes, create)

    def constant(self, weight: Weight, operand: Operand) -> Shared:
        """The buffer of a constant that a kernel reads as `operand`."""
        shape = static_shape(compute_stored_shape(operand.format, weight.array.shape))

        def create() -> np.ndarray:
            return to_stored(_round_to_storage(weight.array, operand.dtype), operand.format)

        return self._get(f"constant {weight.digest} {operand}", prod(shape) * operand.dtype.numpy.itemsize, create)

    def nbytes(self) -> int:
        """Bytes currently allocated."""
        with self._lock:
            return sum(s.buffer.nbytes for s in self._held.values())

    def _get(self, key: str, nbytes: int, create: Callable[[], np.ndarray]) -> Shared:
        """The buffer under a key. Different ones may be created by several threads at once; one that two threads have created is kept once."""
        with self._lock:
            shared = self._held.get(key)
        if shared is not None:
            return shared
        created = Shared(self.backend.allocate(max(nbytes, 1), ALIGNMENT))
        write_bytes(self.backend, created.buffer, 0, create())
        with self._lock:
            return self._held.setdefault(key, created)


class ReadAhead(Generic[Task]):
    """Runs tasks in two threads, a few before the one that is waited for: reading, hashing and copying release the GIL."""

    def __init__(self, work: Callable[[Task], Any]):
        """`work` is done for each task."""
        self._work, self._waiting = work, deque[tuple[Task, Future[Any]]]()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="whet-weights")

    def __enter__(self) -> ReadAhead[Task]:
        return self

    def submit(self, task: Task) -> Iterator[tuple[Task, Any]]:
        """Starts a task; yields the oldest ones with their results if too many are waiting."""
        self._waiting.append((task, self._pool.submit(self._work, task)))
        while len(self._waiting) > _STEPS_AHEAD:
            yield self._take()

    def finish(self) -> Iterator[tuple[Task, Any]]:
        """Yields the tasks that were not yielded yet, in the order of submission, with their results. An exception of a task is raised here."""
        while self._waiting:
            yield self._take()

    def _take(self) -> tuple[Task, Any]:
        task, future = self._waiting.popleft()
        return task, future.result()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

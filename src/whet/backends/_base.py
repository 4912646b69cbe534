"""The contract of a backend: one protocol with memory, launch lists and a clock, and the capabilities that everything else reads.

A backend is a folder `backends/<name>/` (or a module) with one class decorated with `@backend`. `Backend` implements every optional method, so a
derived class defines `allocate`, `stream`, `seconds`, `key` and `describe`, and the methods that its capabilities require. Other packages do not
compare backend names or probe for methods: they read `backend.capabilities`, or `get_capabilities(name)` without an open device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol, Self, TypeVar

import numpy as np

from whet.errors import BackendError
from whet.registry import suggest_name

_Class = TypeVar("_Class", bound="type[Backend]")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Properties of a device and features of its backend.

    A backend's class has those that hold for every device of its kind; an instance also has the properties of its device, as reported by the
    operating system or the driver. A property that is not reported is 0 or empty.
    """

    # properties of the device
    features: frozenset[str] = frozenset()  # instruction sets ("avx512f", "amx_int8"), or architecture and units of a GPU ("sm_90", "wgmma", "tma")
    multiprocessors: int = 0  # streaming multiprocessors of a GPU
    shared_memory: int = 0  # bytes of shared memory that one thread block can use
    cache_bytes: Mapping[int, int] = field(default_factory=dict)  # level -> bytes of data cache, summed over all cores
    # features of the backend
    executes: bool = True  # False: kernels are planned and their cost is estimated; outputs are not computed
    host_memory: bool = True  # buffers are host memory: NumPy views and kernels in Python can use them
    workers: bool = False  # the number of threads can be chosen, and several launch lists can run in parallel, one thread each (`parallel_launch`)
    overlapping_launches: bool = False  # a launch may start while its predecessor runs, so a kernel must be timed within the network
    compiles_ahead: bool = False  # kernels are compiled from source before their first launch; `compile_ahead` compiles in the background
    cold_cache_clock: bool = False  # `cold_seconds` times a run with operands outside the L2 cache
    reference_products: bool = False  # `multiply` and `convolve` compute products for the references of verification
    measures_load: bool = False  # `watch` measures the load that other programs put on the device
    user_streams: bool = False  # `enqueue` starts a run on a user's stream and returns before it is done
    numbered_devices: bool = False  # there may be several devices, chosen by number: `--device=N`, `cuda:N`
    dlpack_device: int = 1  # device type of its memory in DLPack: 1 is the CPU (kDLCPU), 2 CUDA (kDLCUDA)
    unsupported_types: frozenset[str] = frozenset()  # storage types that no kernel uses here ("f16", "f8e4m3"), by whet's names of types
    widened_types: frozenset[str] = frozenset()  # 16-bit types in which the layers of a model do not compute: they become f32 (builder/lowering.py)
    with_8_bits: tuple[str, ...] = ()  # precisions that `whet auto` permits together with "int8" and "fp8", for layers that stay in floating point
    flag_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # flag of `whet exec` -> the equivalent --tacticSources switches
    energy_seconds: float = 1.0  # minimum duration of an energy measurement, from the update interval of the device's counter


@dataclass
class Buffer:
    """Memory of a backend: address, bytes, and (host memory only) a NumPy view of them."""

    address: int
    nbytes: int
    array: np.ndarray | None = None
    owner: Any = None  # keeps the memory alive


@dataclass
class Load:
    """CPU time that other programs used during a timing: `others` in CPUs (0.5 is half a core), None if not measured.

    `stolen` is the steal time in it (proc_stat(5)): a hypervisor ran other virtual machines of the same host although this one had work. Their use of
    shared caches, memory bandwidth or the sibling hyperthread is not included.
    """

    others: float | None = None
    seconds: float = 0.0
    stolen: float = 0.0

    @property
    def who(self) -> str:
        """The source of the load, for messages."""
        if self.others is None or self.stolen <= 0.1 * self.others:
            return "other processes"
        guests = "other guests of this machine's host"
        return guests if self.stolen >= 0.9 * self.others else f"other processes and {guests}"

    @property
    def disturbed(self) -> bool:
        """True if others used more than a fifth of a CPU; never for less than 0.1 s, as /proc counts in ticks of 10 ms."""
        return self.others is not None and self.seconds >= 0.1 and self.others > 0.2


@dataclass(frozen=True)
class Difference:
    """Comparison of values a with a reference b over the elements that are finite in both, and the count of unequal elements elsewhere."""

    worst: float  # max |a - b|
    error: float  # ||a - b||
    largest: float  # max |b|
    norm: float  # ||b||
    odd: int  # elements that are not finite in both and not the same

    @property
    def relative(self) -> float:
        """The larger of max|a-b|/max|b| and ||a-b||/||b||; infinite if NaN or infinities differ."""
        if self.odd:
            return float("inf")
        if self.worst == 0:
            return 0.0
        return max(self.worst / self.largest, self.error / self.norm) if self.largest else self.worst


class Call(ABC):
    """One recorded launch; base class of the work that kernels put on a stream."""

    #: (function, a, b, c, d): five machine words for a loop in machine code; None: `run` is called
    native: tuple[int, int, int, int, int] | None = None
    #: False: the native function returns nothing; True: it returns a status, 0 on success
    returns_status: bool = True
    #: what another status than success means, as a message for the user; "": the kernel itself failed
    failure: str = ""
    #: the library's or kernel's name, for messages; "": the class name
    implementation: str = ""
    #: names of the source nodes, for profilers
    label: str = ""
    #: ("input" or "output", index) of the layer's tensors that the launch uses; None: possibly all
    operands: Collection[tuple[str, int]] | None = None

    @abstractmethod
    def run(self) -> None:
        """Executes the launch now."""

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Replaces the address of operand `index` of `kind` ("input" or "output"): users' own buffers. Raises BackendError if it has none."""
        raise BackendError(f"{type(self).__name__} has no operand whose address can change")

    def make_address_setter(self, kind: str, index: int) -> Callable[[int], None]:
        """`set_address` for one operand as a function."""
        return partial(self.set_address, kind, index)


class Recorder(Protocol):
    """A stream that launches are recorded on: `calls` has them in order."""

    calls: list[Any]

    def record(self, call: Any) -> None:
        """Appends a launch."""

    def finish(self) -> Executable:
        """The recorded launches, ready to run."""


class Executable(Protocol):
    """Recorded launches that run again and again."""

    def run(self) -> None:
        """Runs all launches and returns when the results are complete. Raises BackendError when a kernel fails."""

    def run_timed(self) -> list[float]:
        """Runs launch by launch and returns the seconds of each (for the profiler; slower in total)."""

    needs_refresh: bool = True  # False if `refresh` does nothing

    def refresh(self, calls: Sequence[Call]) -> None:
        """Called after addresses of operands of these recorded launches have changed."""
        return None


class Completion(Protocol):
    """The end of a run that was enqueued."""

    @property
    def done(self) -> bool:
        """True if the outputs are complete. Raises BackendError when a kernel failed."""

    def synchronize(self) -> None:
        """Waits for the outputs. Raises BackendError when a kernel failed."""

    def close(self) -> None:
        """Releases its resources."""


class Backend(Protocol):
    """A device with memory, recorded launches and a clock. Derive from it: methods with a body are defaults.

    `name` is its folder's name, set by `@backend`. `threads` is the number of CPU threads that kernels are planned for (1 on a GPU). The
    constructor takes `threads` (0: the backend chooses) and ignores keywords that it does not know; it raises BackendError when the device, its
    driver or a library is missing.
    """

    name: str = ""
    threads: int = 1
    capabilities: Capabilities = Capabilities()

    # required

    @abstractmethod
    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        """Zeroed memory. Raises BackendError (with the sizes) when there is not enough."""

    @abstractmethod
    def stream(self) -> Recorder:
        """A new Recorder for kernels' `enqueue`."""

    @abstractmethod
    def seconds(self, executable: Any, repeats: int) -> list[float]:
        """Seconds of each of `repeats` runs by the device's clock."""

    @abstractmethod
    def key(self) -> str:
        """All properties of the device that can change a time or a result: model, features, threads, driver and compiler versions."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Description of the device for reports and engine headers: "backend", "model" and more, as JSON data."""

    # threads of the calling process

    def activate(self) -> None:
        """Makes the calling thread ready to plan and run kernels: its OpenMP thread count, its GPU context."""
        return None

    @property
    def caution(self) -> str:
        """A warning about times or kernels on this device; "" for none."""
        return ""

    @property
    def lost(self) -> str:
        """Reason why the process lost its context on the device, which invalidates all its buffers; "" while the context is valid."""
        return ""

    @property
    def unusable_after_fork(self) -> str:
        """Reason why this process, a child made by fork() after the device was opened, cannot use the device; "" if it can, or is no such child."""
        return ""

    # memory that the host cannot address: required if `host_memory` is False

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
        """A copy of `nbytes` bytes (uint8) of a buffer."""
        self._missing("read")

    def write(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        """Copies bytes (uint8) into a buffer; returns when the copy is complete."""
        self._missing("write")

    def copy(self, target: Buffer, to: int, source: Buffer, at: int, nbytes: int) -> None:
        """Copies `nbytes` from offset `at` of `source` to offset `to` of `target`; returns when the copy is complete."""
        self.write(target, to, self.read(source, at, nbytes))

    def difference(self, a: Buffer, at: int, b: Buffer, to: int, nbytes: int, dtype: str) -> Difference:
        """Compares `nbytes` bytes of `a` from offset `at` with the reference values in `b` from offset `to`, elements of type `dtype`."""
        self._missing("difference")

    # products for the references of verification: required if `reference_products` is True

    def multiply(self, a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """`np.matmul(a, b)` of float32 or float64 matrices (rank 2 or more) on the device, with accumulators of `dtype` and by kernels that no
        tactic uses. Any thread may call it."""
        self._missing("multiply")

    def convolve(
        self, x: np.ndarray, w: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int], group: int,
        transposed: bool, dtype: np.dtype,
    ) -> np.ndarray:  # fmt: skip
        """The convolution of x [N, C, *spatial] with w [K, C / group, *kernel], or the transposed one with w [C, K / group, *kernel], as `multiply`.
        Up to three spatial axes; `sizes` are those of the result, `pads` those before each axis."""
        self._missing("convolve")

    # users' memory on the device, by address: required if `dlpack_device` is not the CPU's

    @property
    def device_number(self) -> int:
        """The number of the device, for backends with `numbered_devices`."""
        return 0

    def read_address(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of bytes (uint8) that belong to another library."""
        self._missing("read_address")

    def write_address(self, address: int, data: np.ndarray) -> None:
        """Copies bytes to memory that belongs to another library; returns when the copy is complete."""
        self._missing("write_address")

    def copy_address(self, to: int, source: int, nbytes: int) -> None:
        """Copies bytes from one address on the device to another; returns when the copy is complete."""
        self._missing("copy_address")

    # users' streams: required if `user_streams` is True

    def enqueue(self, executable: Any, stream: Any = None) -> Completion:
        """Starts a run on a user's stream (None: the executable's own) and returns at once."""
        self._missing("enqueue")

    def start(self, executable: Any, stream: Any) -> None:
        """As `enqueue`, without an object that tells when the run is done."""
        self.enqueue(executable, stream).close()

    def after_default_stream(self, executable: Any) -> None:
        """Makes the next run of `executable` wait for the work of other libraries on the device's default stream."""
        self._missing("after_default_stream")

    # several launch lists at once: required if `workers` is True

    def why_not_parallel(self, calls: Sequence[Any]) -> str | None:
        """Reason why launches recorded for one thread cannot run in parallel with others; None if they can."""
        return f"the backend '{self.name}' runs one launch list at a time"

    def parallel_launch(self, launch_lists: Sequence[Sequence[Any]]) -> Call:
        """One launch that runs several launch lists in parallel, one thread each. Raises BackendError if `why_not_parallel` gives a reason."""
        raise BackendError(f"launch lists cannot run in parallel: {self.why_not_parallel(())}.")

    # measuring

    def seconds_in_row(self, executables: Sequence[Any]) -> list[float]:
        """Seconds of one run of each executable, back to back, so that launch overhead is hidden by the preceding run.

        On a GPU the launch overhead of the host would otherwise be measured too; it is as long as a layer of a small network.
        """
        return [self.seconds(executable, 1)[0] for executable in executables]

    def cold_seconds(self, executable: Any, before: Any | None, other: Buffer) -> float:
        """Seconds of a run with an L2 cache that holds only data left by a run of `before`; `other` is memory larger than that cache."""
        self._missing("cold_seconds")

    def warm(self, array: np.ndarray) -> None:
        """Reads an array into the caches. For backends with `cache_bytes`."""
        return None

    def evict(self, pieces: Iterable[tuple[int, int]]) -> bool:
        """Removes memory (address, bytes) from all caches; returns False without effect if the device has no fast instruction for it."""
        return False

    def watch(self) -> AbstractContextManager[Load]:
        """A context that measures the external load; its Load is complete when the context ends."""
        return _not_measured()

    def compile_ahead(self, sources: Iterable[str]) -> None:
        """Starts background compilation of kernels that will be timed soon."""
        return None

    def with_sources_to(self, receive: Callable[[Iterable[str]], object]) -> Self:
        """This backend, but its `compile_ahead` gives the sources to `receive` and compiles nothing: for listing what tactics would compile."""
        listing = copy(self)
        vars(listing)["compile_ahead"] = receive
        return listing

    def peaks(self) -> dict[str, float]:
        """Peak rates of the hardware: "bytes" a second and operations a second by type ("f16", ...); {} if unknown."""
        return {}

    def state(self) -> dict[str, Any]:
        """Clocks (MHz), power (W), temperature (degrees Celsius) and other processes at this moment; {} if the device does not report them."""
        return {}

    def _missing(self, method: str) -> NoReturn:
        raise BackendError(f"the backend '{self.name}' has no method {method}(), which its capabilities require")


@contextmanager
def _not_measured() -> Iterator[Load]:
    yield Load()


BACKENDS: dict[str, type[Backend]] = {}


def backend(cls: _Class) -> _Class:
    """Class decorator: registers a backend under its file's or folder's name. Raises BackendError when the name is taken."""
    name = cls.__module__.split(".")[2]
    if name in BACKENDS:
        raise BackendError(f"backend {name} has two owners")
    cls.name = name
    BACKENDS[name] = cls
    return cls


def get_backend_class(name: str) -> type[Backend]:
    """The class registered as `name`. Raises BackendError with the registered names and the nearest of them."""
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; there are {', '.join(sorted(BACKENDS))}.{suggest_name(name, BACKENDS)}")
    return BACKENDS[name]


def get_capabilities(name: str) -> Capabilities:
    """The capabilities that all devices of a backend have; no device is opened. Raises BackendError for an unknown name."""
    return get_backend_class(name).capabilities


def get_backend(name: str = "cpu", **options: Any) -> Backend:
    """A backend by name. Raises BackendError for an unknown name, or if the device, driver or library is missing."""
    return get_backend_class(name)(**options)

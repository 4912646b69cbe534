"""The CUDA backend: device memory, launch lists as CUDA graphs, the GPU's clock. Importing this loads no CUDA library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from whet.backends._base import Buffer, backend
from whet.backends.cuda import driver, nvml
from whet.backends.cuda.compare import Difference, difference
from whet.backends.cuda.compile import compile_ahead, nvrtc_version
from whet.backends.cuda.executor import GpuExecutable, GpuStream
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.errors import BackendError

MEASURED = (9, 0)  # the compute capability that whet's kernels have run on


@backend
class CudaBackend:
    """GPU number `device` (default: `default_device`). Raises BackendError when there is none, the driver is too old or the packages are missing."""

    name = "cuda"
    runs = True
    overlaps = True  # a launch begins while the one in front still runs: what a kernel costs shows only in the network
    default_device = 0  # the GPU that is taken where none is named: `whet exec --device=N`
    cache_bytes: dict[int, int] = {}  # noqa: RUF012 - candidates are timed as overlapping chains in a warm L2 cache, finalists by `cold_seconds` too

    def __init__(self, device: int | None = None, threads: int = 0, **_: Any) -> None:
        self.device = driver.device(self.default_device if device is None else device)
        self.threads = threads or 1  # launches come from one thread; kept for the shared contract
        major, minor = self.device.capability
        if major < 8:
            raise BackendError(f"{self.device.name} has compute capability {major}.{minor}; whet's kernels need 8.0 or newer. Use --backend=cpu.")
        self.features = frozenset({f"sm_{major}{minor}", *(("wgmma", "tma") if (major, minor) == (9, 0) else ())})
        self.multiprocessors, self.l2_bytes = self.device.multiprocessors, self.device.l2_bytes
        self.shared_memory = self.device.shared_memory  # bytes that a block can have

    @property
    def caution(self) -> str:
        """What a user of this GPU should know before trusting times or kernels, "" on what whet was measured on."""
        major, minor = self.device.capability
        if (major, minor) == MEASURED:
            return ""
        return (
            f"{self.device.name} has compute capability {major}.{minor}: whet's kernels were never run there, only on 9.0. "
            + ("Tests compile them for 8.0, 8.6 and 8.9. " if major == 8 else "Nothing was compiled for it before. ")
            + "Tensor-core convolutions come from libraries there (cuBLASLt; --tacticSources=+CUDNN does more). Engines are verified as ever."
        )

    @property
    def lost(self) -> str:
        """Why this process's context on the GPU is gone, "" while it is not."""
        return self.device.lost

    def activate(self) -> None:
        """Bind the GPU to the calling thread."""
        self.device.make_current()

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        """Zeroed device memory, 256-byte aligned; the host reads and writes it through `read` and `write`."""
        if alignment > 256:
            raise BackendError(f"device memory is aligned to 256 bytes, {alignment} were asked for. This is a mistake in whet: please report it.")
        self.activate()
        memory = DeviceBuffer(nbytes)
        memory.fill(0)
        return Buffer(memory.address, memory.nbytes, None, memory)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
        """A copy of device bytes; waits for work on the default stream (executables wait for their own)."""
        self.activate()
        return buffer.owner.read((nbytes,), np.uint8, offset)

    def write(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        """Copies bytes to the device; returns when they are there."""
        self.activate()
        buffer.owner.write(data, offset)

    def read_address(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of device bytes at an address that is somebody else's."""
        self.activate()
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            driver.ok(driver.cu().cuMemcpyDtoH(out.ctypes.data, address, nbytes))
        return out

    def write_address(self, address: int, data: np.ndarray) -> None:
        """Copies bytes to an address that is somebody else's; returns when they are there."""
        self.activate()
        source = np.ascontiguousarray(data)
        if source.nbytes:
            driver.ok(driver.cu().cuMemcpyHtoD(address, source.ctypes.data, source.nbytes))
            driver.ok(driver.cu().cuStreamSynchronize(0))

    def copy_address(self, to: int, source: int, nbytes: int) -> None:
        """Copies bytes from one address on the GPU to another; returns when they are there."""
        self.activate()
        if nbytes:
            driver.ok(driver.cu().cuMemcpyDtoD(to, source, nbytes))
            driver.ok(driver.cu().cuStreamSynchronize(0))

    def as_stream(self, stream: Any) -> Stream:
        """A user's stream (torch, CuPy, cuda-core, an address) as one that launches take."""
        self.activate()
        return Stream.of(stream)

    def event(self) -> Event:
        """A new event without timing."""
        self.activate()
        return Event(timing=False)

    def after_default_stream(self, stream: Stream) -> None:
        """What follows on `stream` waits for the work given to the default stream so far: where other libraries put theirs."""
        self.activate()
        event = Event(timing=False)
        event.record(Stream.of(0))
        stream.wait(event)
        event.close()

    def copy(self, target: Buffer, to: int, source: Buffer, at: int, nbytes: int) -> None:
        """Copies bytes within device memory; returns when they are there."""
        self.activate()
        target.owner.copy(source.owner, to, at, nbytes)

    def difference(self, a: Buffer, at: int, b: Buffer, to: int, nbytes: int, dtype: str) -> Difference:
        """How far `nbytes` of `a` are from those of `b`, the judge's side, as numbers of a type; computed on the GPU."""
        self.activate()
        return difference(self.device, a.address + at, b.address + to, nbytes, dtype)

    def compile_ahead(self, sources: Iterable[str]) -> None:
        """Starts compiling kernels that will be timed soon, on all CPUs."""
        compile_ahead(sources, self.device.arch)

    def stream(self) -> GpuStream:
        """A new recording stream."""
        return GpuStream(self.device)

    def seconds(self, executable: GpuExecutable, repeats: int) -> list[float]:
        """GPU seconds of each of `repeats` runs, by events around the graph."""
        return executable.seconds(repeats)

    def seconds_in_row(self, executables: Sequence[GpuExecutable]) -> list[float]:
        """GPU seconds of a run of each, none waiting for the host; the first runs once more in front."""
        return executables[0].seconds_in_row(executables[1:]) if executables else []

    def cold_seconds(self, executable: GpuExecutable, before: GpuExecutable | None, other: Buffer) -> float:
        """GPU seconds of a run that finds nothing in the L2 cache but what `before` leaves there; `other` memory is larger than the cache."""
        return executable.cold_seconds(before, other.owner)

    def key(self) -> str:
        """Model, capability, multiprocessors, driver and compiler version."""
        major, minor = self.device.capability
        version = driver.ok(driver.cu().cuDriverGetVersion())
        return f"{self.device.name} | sm_{major}{minor} x{self.multiprocessors} | driver {version} | nvrtc {nvrtc_version()}"

    def describe(self) -> dict[str, Any]:
        """The machine, for people and for engines' headers."""
        major, minor = self.device.capability
        _, total = self.device.free_memory()
        return {
            "backend": "cuda",
            "model": self.device.name,
            "capability": f"{major}.{minor}",
            **({} if (major, minor) == MEASURED else {"measured": "never run on this capability"}),
            "multiprocessors": self.multiprocessors,
            "memory_bytes": total,
            "l2_bytes": self.device.l2_bytes,
            "bytes_per_s": self.peaks()["bytes"],
            "peak_flops_per_s": self.peaks()["f16"],
            "driver": driver.ok(driver.cu().cuDriverGetVersion()),
            "nvrtc": nvrtc_version(),
        }

    def peaks(self) -> dict[str, float]:
        """Bytes and operations a second that the hardware can reach."""
        return self.device.peaks()

    def state(self) -> dict[str, Any]:
        """Clocks, power, temperature and other processes now."""
        return asdict(nvml.state(self.device.bus_id))


__all__ = ["CudaBackend", "GpuExecutable", "GpuStream"]

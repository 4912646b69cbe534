"""The CUDA backend: device memory, launch lists as CUDA graphs, the GPU's clock. Importing this loads no CUDA library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from whet.backends._base import Backend, Buffer, Capabilities, Difference, backend
from whet.backends.cuda import driver, nvml
from whet.backends.cuda.compare import compute_difference
from whet.backends.cuda.compile import compile_ahead, get_nvrtc_version
from whet.backends.cuda.executor import GpuExecutable, GpuStream
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.products import plan_convolve, plan_multiply, run_products
from whet.backends.cuda.stream import Event, Stream
from whet.errors import BackendError

MEASURED = (9, 0)  # the compute capability on which whet's kernels were tested
COMPILED = "8.0, 8.6, 8.9 and 10.0"  # those for which tests compile kernels without running them


@backend
class CudaBackend(Backend):
    """GPU number `device` (default: `default_device`). Raises BackendError when there is none, the driver is too old or the packages are missing."""

    capabilities = Capabilities(
        host_memory=False, overlapping_launches=True, compiles_ahead=True, cold_cache_clock=True, user_streams=True, numbered_devices=True,
        reference_products=True, dlpack_device=2, with_8_bits=("fp16",), energy_seconds=2.0,
        flag_sources={"pure": ("-CUBLASLT", "-CUDNN"), "noTF32": ("-TF32",), "allowFallback": ("+host_reference",)},
    )  # fmt: skip
    default_device = 0  # the GPU number that `whet exec --device=N` sets

    def __init__(self, device: int | None = None, threads: int = 0, **_: Any) -> None:
        self.device = driver.open_device(self.default_device if device is None else device)
        self.threads = threads or 1  # launches come from one thread; required by the protocol
        major, minor = self.device.capability
        if major < 8:
            raise BackendError(f"{self.device.name} has compute capability {major}.{minor}; whet's kernels need 8.0 or newer. Use --backend=cpu.")
        gpu = self.device
        self.capabilities = of_architecture((major, minor), gpu.multiprocessors, gpu.shared_memory, gpu.l2_bytes)

    @property
    def caution(self) -> str:
        """A warning that the GPU has an untested compute capability; "" on the tested one."""
        major, minor = self.device.capability
        if (major, minor) == MEASURED:
            return ""
        return (
            f"{self.device.name} has compute capability {major}.{minor}: whet's kernels were only run on 9.0. "
            + (f"Tests compile them for {COMPILED}. " if f"{major}.{minor}" in COMPILED else "They were never compiled for it. ")
            + "Tensor-core convolutions come from libraries there (cuBLASLt; more with --tacticSources=+CUDNN). Engines are verified as always."
        )

    @property
    def lost(self) -> str:
        """Reason why this process lost its context on the GPU; "" while the context is valid."""
        return self.device.lost

    @property
    def unusable_after_fork(self) -> str:
        """Reason why a child made by fork() cannot use the GPU."""
        return driver.why_lost_by_fork()

    def activate(self) -> None:
        """Binds the GPU to the calling thread."""
        self.device.make_current()

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        """Zeroed device memory, 256-byte aligned; the host reads and writes it through `read` and `write`."""
        if alignment > 256:
            raise BackendError(f"device memory is aligned to 256 bytes, not {alignment}. This is a mistake in whet: please report it.")
        self.activate()
        memory = DeviceBuffer(nbytes)
        memory.fill(0)
        return Buffer(memory.address, memory.nbytes, None, memory)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
        """A copy of device bytes; waits for work on the default stream (executables wait for their own stream)."""
        self.activate()
        return buffer.owner.read((nbytes,), np.uint8, offset)

    def write(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        """Copies bytes to the device; returns when the copy is complete."""
        self.activate()
        buffer.owner.write(data, offset)

    def read_address(self, address: int, nbytes: int) -> np.ndarray:
        """A copy of device bytes at an address of another library's memory."""
        self.activate()
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            driver.check_status(driver.load_driver().cuMemcpyDtoH(out.ctypes.data, address, nbytes))
        return out

    def write_address(self, address: int, data: np.ndarray) -> None:
        """Copies bytes to an address of another library's memory; returns when the copy is complete."""
        self.activate()
        source = np.ascontiguousarray(data)
        if source.nbytes:
            driver.check_status(driver.load_driver().cuMemcpyHtoD(address, source.ctypes.data, source.nbytes))
            driver.check_status(driver.load_driver().cuStreamSynchronize(0))

    def copy_address(self, to: int, source: int, nbytes: int) -> None:
        """Copies bytes from one address on the GPU to another; returns when the copy is complete."""
        self.activate()
        if nbytes:
            driver.check_status(driver.load_driver().cuMemcpyDtoD(to, source, nbytes))
            driver.check_status(driver.load_driver().cuStreamSynchronize(0))

    @property
    def device_number(self) -> int:
        """The ordinal of the GPU among those that CUDA_VISIBLE_DEVICES shows."""
        return self.device.ordinal

    def enqueue(self, executable: GpuExecutable, stream: Any = None) -> Event:
        """Starts a run on a user's stream (torch, CuPy, cuda-core, an address; None: the executable's own) and returns at once."""
        target = executable.stream if stream is None else Stream.of(stream)
        self.start(executable, target)
        event = Event(timing=False)
        event.record(target)
        return event

    def start(self, executable: GpuExecutable, stream: Any) -> None:
        """As `enqueue`, without an object that tells when the run is done."""
        executable.enqueue(Stream.of(stream))

    def after_default_stream(self, executable: GpuExecutable) -> None:
        """Makes the next run of `executable` wait for the work of other libraries on the default stream."""
        self.activate()
        event = Event(timing=False)
        event.record(Stream.of(0))
        executable.stream.wait(event)
        event.close()

    def copy(self, target: Buffer, to: int, source: Buffer, at: int, nbytes: int) -> None:
        """Copies bytes within device memory; returns when the copy is complete."""
        self.activate()
        target.owner.copy(source.owner, to, at, nbytes)

    def difference(self, a: Buffer, at: int, b: Buffer, to: int, nbytes: int, dtype: str) -> Difference:
        """Compares `nbytes` of `a` with the reference `b`, elements of type `dtype`, on the GPU."""
        self.activate()
        return compute_difference(self.device, a.address + at, b.address + to, nbytes, dtype)

    def multiply(self, a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """`np.matmul(a, b)` on the GPU, a thread per result."""
        return run_products(self.device, plan_multiply(a, b, dtype))

    def convolve(
        self, x: np.ndarray, w: np.ndarray, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int], group: int,
        transposed: bool, dtype: np.dtype,
    ) -> np.ndarray:  # fmt: skip
        """A convolution, or a transposed one, on the GPU, a thread per result."""
        return run_products(self.device, plan_convolve(x, w, sizes, strides, dilations, pads, group, transposed, dtype))

    def compile_ahead(self, sources: Iterable[str]) -> None:
        """Starts compilation of kernels that will be timed soon, on all CPUs."""
        compile_ahead(sources, self.device.arch)

    def stream(self) -> GpuStream:
        """A new recording stream."""
        return GpuStream(self.device)

    def seconds(self, executable: GpuExecutable, repeats: int) -> list[float]:
        """GPU seconds of each of `repeats` runs, by events around the graph."""
        return executable.seconds(repeats)

    def seconds_in_row(self, executables: Sequence[GpuExecutable]) -> list[float]:
        """GPU seconds of one run of each, without waits for the host; an extra untimed run of the first precedes them."""
        return executables[0].seconds_in_row(executables[1:]) if executables else []

    def cold_seconds(self, executable: GpuExecutable, before: GpuExecutable | None, other: Buffer) -> float:
        """GPU seconds of a run with an L2 cache that holds only data left by `before`; `other` is memory larger than the cache."""
        return executable.cold_seconds(before, other.owner)

    def key(self) -> str:
        """Model, capability, multiprocessors, driver and compiler version."""
        major, minor = self.device.capability
        version = driver.check_status(driver.load_driver().cuDriverGetVersion())
        return f"{self.device.name} | sm_{major}{minor} x{self.device.multiprocessors} | driver {version} | nvrtc {get_nvrtc_version()}"

    def describe(self) -> dict[str, Any]:
        """Description of the machine for reports and engine headers."""
        major, minor = self.device.capability
        _, total = self.device.free_memory()
        return {
            "backend": "cuda",
            "model": self.device.name,
            "capability": f"{major}.{minor}",
            **({} if (major, minor) == MEASURED else {"measured": "never run on this capability"}),
            "multiprocessors": self.device.multiprocessors,
            "memory_bytes": total,
            "l2_bytes": self.device.l2_bytes,
            "bytes_per_s": self.peaks()["bytes"],
            "peak_flops_per_s": self.peaks()["f16"],
            "driver": driver.check_status(driver.load_driver().cuDriverGetVersion()),
            "nvrtc": get_nvrtc_version(),
        }

    def peaks(self) -> dict[str, float]:
        """Peak bytes and operations per second of the hardware."""
        return self.device.peaks()

    def state(self) -> dict[str, Any]:
        """Current clocks, power, temperature and other processes."""
        return asdict(nvml.state(self.device.bus_id))


def of_architecture(capability: tuple[int, int], multiprocessors: int, shared_memory: int, l2_bytes: int) -> Capabilities:
    """Capabilities of a GPU of a compute capability; the kernels for FP8 need Hopper's tensor cores."""
    hopper = capability == (9, 0)
    features = frozenset({"sm_{}{}".format(*capability), *(("wgmma", "tma") if hopper else ())})
    return replace(
        CudaBackend.capabilities, features=features, multiprocessors=multiprocessors, shared_memory=shared_memory, cache_bytes={2: l2_bytes},
        unsupported_types=frozenset() if hopper else frozenset({"f8e4m3"}),
    )  # fmt: skip


__all__ = ["CudaBackend", "GpuExecutable", "GpuStream"]

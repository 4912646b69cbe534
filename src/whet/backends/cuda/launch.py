"""Kernels from machine code, launches with their arguments, and lists of launches as CUDA graphs."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from whet.backends.cuda.driver import check_status, get_current_device, load_driver, release
from whet.backends.cuda.stream import Stream

MAX_SHARED = 227 * 1024  # bytes available to a block on Hopper


class Module:
    """A loaded cubin. `kernel(name)` returns its functions; each of them keeps the module alive.

    Without a GPU bound to the thread nothing is loaded: launches can be planned and their kernels compiled, but not run.
    """

    def __init__(self, code: bytes) -> None:
        self._device = get_current_device()
        self.handle = None if self._device is None else check_status(load_driver().cuModuleLoadData(code))

    def kernel(self, name: str, shared: int = 0) -> Kernel:
        """The function `name`, allowed to use `shared` bytes of dynamic shared memory."""
        return Kernel(self, name, shared)

    def close(self) -> None:
        """Unloads the module; its kernels must not run afterwards."""
        handle, self.handle = self.handle, None
        if handle is not None:
            release(self._device, load_driver().cuModuleUnload, handle)


class Kernel:
    """One function of a module."""

    def __init__(self, module: Module, name: str, shared: int) -> None:
        self.module, self.name, self.shared = module, name, shared
        self.handle: Any = None
        if module.handle is None:
            return
        driver = load_driver()
        self.handle = check_status(driver.cuModuleGetFunction(module.handle, name.encode()))
        if shared > 48 * 1024:
            check_status(driver.cuFuncSetAttribute(self.handle, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))

    def allow_wide_clusters(self) -> None:
        """Permits clusters of 16 blocks (non-portable size, available on Hopper)."""
        if self.handle is None:
            return
        number = load_driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        check_status(load_driver().cuFuncSetAttribute(self.handle, number, 1))

    def attribute(self, which: str) -> int:
        """A function attribute by the end of its name: "NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES"."""
        number = getattr(load_driver().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        return int(check_status(load_driver().cuFuncGetAttribute(number, self.handle)))


class GpuWork(ABC):
    """Work for a stream: a kernel launch, a library call, or a step on the host. A CUDA graph cannot contain `on_host` work."""

    on_host: ClassVar[bool] = False

    @abstractmethod
    def run(self, stream: Stream) -> None:
        """Puts the work on the stream."""


@dataclass
class Launch(GpuWork):
    """One kernel launch: everything but the stream. `args` are the kernel's parameters as bytes, parameter i from `offsets[i]`: whet's kernels take
    one structure by value."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    args: bytes
    cluster: int = 1  # blocks of a cluster, along x; grid counts blocks
    overlap: bool = True  # may start before the preceding launch ends: the kernel itself waits (griddepcontrol.wait)
    label: str = ""  # the user's name of the layer
    shared: int = -1  # bytes of dynamic shared memory; -1: the size given when the kernel was loaded
    offsets: tuple[int, ...] = (0,)
    _storage: Any = field(default=None, repr=False)
    _pointers: Any = field(default=None, repr=False)
    _config: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        raw = (ctypes.c_char * (len(self.args) + 64))()
        start = (-ctypes.addressof(raw)) % 64  # tensor maps require 64-byte alignment
        ctypes.memmove(ctypes.addressof(raw) + start, self.args, len(self.args))
        self._storage = raw
        self._pointers = (ctypes.c_void_p * len(self.offsets))(*(ctypes.addressof(raw) + start + offset for offset in self.offsets))
        if self.cluster > 8:
            self.kernel.allow_wide_clusters()

    def run(self, stream: Stream) -> None:
        """Puts the launch on the stream."""
        if self._config is None:
            self._config = self._launch_config()
        self._config.hStream = stream.handle
        driver = load_driver()
        check_status(driver.cuLaunchKernelEx(self._config, self.kernel.handle, ctypes.addressof(self._pointers), 0))

    def _launch_config(self) -> Any:
        """The driver's launch configuration, for any stream; cached, as its creation takes longer than a launch."""
        driver = load_driver()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block, 1, 1
        config.sharedMemBytes = self.kernel.shared if self.shared < 0 else self.shared
        attributes = []
        if self.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self.cluster, 1, 1
            attributes.append(cluster)
        here = get_current_device()
        if self.overlap and here is not None and here.capability >= (9, 0):
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class Graph:
    """A list of launches captured once and replayed with one call; the capture keeps programmatic dependent launches between adjacent launches."""

    def __init__(self, launches: Iterable[GpuWork], stream: Stream) -> None:
        driver = load_driver()
        self._device = get_current_device()
        self.launches = list(launches)
        check_status(driver.cuStreamBeginCapture(stream.handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        try:
            for launch in self.launches:
                launch.run(stream)
        finally:
            graph = check_status(driver.cuStreamEndCapture(stream.handle))
        self.handle = check_status(driver.cuGraphInstantiate(graph, 0))
        check_status(driver.cuGraphDestroy(graph))
        check_status(driver.cuGraphUpload(self.handle, stream.handle))

    def run(self, stream: Stream) -> None:
        """Replays all launches on the stream."""
        check_status(load_driver().cuGraphLaunch(self.handle, stream.handle))

    def close(self) -> None:
        """Releases the executable graph."""
        handle, self.handle = self.handle, None
        if handle is not None:
            release(self._device, load_driver().cuGraphExecDestroy, handle)

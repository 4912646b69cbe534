"""The CUDA driver, loaded when first needed. Every call is checked, every failure is described.

The `cuda` packages are not imported together with this module, so that whet runs on machines without a GPU.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from whet.errors import BackendError, ContextError
from whet.forks import make_lock

_Made = TypeVar("_Made")
_lost = ""  # see why_lost_by_fork
_here = threading.local()  # .device: the GPU whose context is bound to this thread
#: errors after which every call in the context fails with the same error: its memory, streams and modules are lost
_STICKY = frozenset({
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_CONTEXT_IS_DESTROYED",
})  # fmt: skip
MIN_DRIVER = 12000  # thread-block clusters, programmatic dependent launch and tensor maps came with CUDA 12


def _make_missing_library_error(library: str, remedy: str, error: Exception) -> BackendError:
    return BackendError(f"{library} cannot be loaded ({error}). The CUDA backend needs it. {remedy}, or use --backend=cpu.")


class LostContext(BackendError):
    """A kernel faulted: this process's context on the GPU is lost, with all its memory, streams and modules."""


@functools.cache
def load_driver() -> Any:
    """The driver's binding module, initialized. Raises BackendError without the package, the driver or a GPU."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _make_missing_library_error("the package cuda-bindings", "Install it with `pip install whet[cuda]`", error) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the binding found no libcuda.so.1
        raise _make_missing_library_error(
            "the NVIDIA driver (libcuda.so.1)", "Run this on a machine with an NVIDIA GPU and its driver", error
        ) from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise BackendError("No NVIDIA GPU is visible. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --backend=cpu.")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"The NVIDIA driver did not start ({status.name}). Check `nvidia-smi`, or use --backend=cpu.")
    version = _to_plain(driver, driver.cuDriverGetVersion())
    if version < MIN_DRIVER:
        raise BackendError(
            f"The NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; whet needs {MIN_DRIVER // 1000}.0 or newer. "
            "Update the driver, or use --backend=cpu."
        )
    return driver


def _to_plain(driver: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        text = _describe(driver, status)
        if status.name in _STICKY:
            here = get_current_device()
            if here is not None:
                here.lost = here.lost or text
            raise LostContext(text)
        raise BackendError(text)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _describe(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    words = text.decode() if isinstance(text, bytes) else str(text)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return f"The GPU is out of memory ({words}). Lower --memPoolSize or the batch, or end other programs on this GPU (`nvidia-smi` lists them)."
    if status.name in _STICKY:
        return (
            f"A GPU kernel failed ({status.name}: {words}). Everything that this process had on the GPU is lost: engines and contexts loaded "
            "so far cannot be used again. The process goes on; load the engine again, in a new process if this one gets no new GPU context, "
            "and report the network with the output of `whet explain`."
        )
    return f"The CUDA driver refused a call ({status.name}: {words})."


def check_status(answer: tuple[Any, ...]) -> Any:
    """The values of a driver call's answer (None, one value, or a tuple); raises BackendError if its status is not success."""
    return _to_plain(load_driver(), answer)


def why_lost_by_fork() -> str:
    """The reason why this process, made by fork() after its parent had opened the driver, cannot use the GPU; "" if it can."""
    return _lost


def _mark_lost_after_fork() -> None:
    global _lost
    if load_driver.cache_info().currsize:
        _lost = "a CUDA context does not survive fork(): this child process cannot use the GPU that its parent has opened. "
        _lost += "Start processes with multiprocessing's 'spawn' or 'forkserver' and load the engine in the child."


os.register_at_fork(after_in_child=_mark_lost_after_fork)


def why_unavailable() -> str | None:
    """None if a GPU can be used, else the reason why not."""
    try:
        load_driver()
    except BackendError as error:
        return str(error)
    return _lost or None


def _check_process() -> None:
    if _lost:
        raise ContextError(_lost)


_devices: dict[int, Device] = {}
_lock = make_lock()


def open_device(ordinal: int = 0) -> Device:
    """The GPU number `ordinal`, with its primary context bound to this thread.

    A context destroyed by a fault is replaced by a new one. Raises BackendError if the driver does not allow this within a process, and
    ContextError in a child made by fork() after the parent had opened the driver. Other
    libraries of the process have lost their memory on that GPU too, already by the fault.
    """
    _check_process()
    with _lock:
        gpu = _devices.get(ordinal)
        if gpu is not None and gpu.lost:
            gpu = _renew_context(gpu)
        if gpu is None:
            gpu = Device(ordinal)
        _devices[ordinal] = gpu
    gpu.make_current()
    return gpu


def _renew_context(old: Device) -> Device:
    """A new primary context in place of a lost one. Raises BackendError if the driver provides none that works."""
    driver = load_driver()
    driver.cuCtxSetCurrent(driver.CUcontext(0))
    driver.cuDevicePrimaryCtxReset(old.handle)
    try:
        device = Device(old.ordinal)
        device.make_current()
        check_status(driver.cuMemFree(check_status(driver.cuMemAlloc(256))))
    except BackendError as error:
        raise LostContext(
            f"GPU {old.ordinal} gives this process no new context after a kernel failed ({error}). Load the engine in a new process."
        ) from error
    return device


def get_current_device() -> Device | None:
    """The GPU whose context is bound to this thread."""
    return getattr(_here, "device", None)


def per_device(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """Caches results per GPU context, as modules and handles are valid in one context only."""

    @functools.cache
    def cached(_: Device | None, *args: Any, **named: Any) -> _Made:
        return make(*args, **named)

    @functools.wraps(make)
    def call(*args: Any, **named: Any) -> _Made:
        return cached(get_current_device(), *args, **named)

    return call


def release(owner: Device | None, call: Callable[..., Any], handle: Any) -> None:
    """Releases a resource unless its context is lost. The status is ignored: at exit the driver may be unloaded."""
    if _lost:  # it belongs to the parent process
        return
    if owner is None or not owner.lost:
        if owner is not None and get_current_device() is None:
            owner.make_current()
        call(handle)


#: compute capability -> operations per multiprocessor and clock: f32 without tensor cores, dense f16 and f8 on them (architecture whitepapers)
_PER_CLOCK = {
    (8, 0): (128, 2048, 0), (8, 6): (256, 1024, 0), (8, 9): (256, 1024, 2048), (9, 0): (256, 4096, 8192), (10, 0): (256, 8192, 16384),
    (12, 0): (256, 1024, 2048),
}  # fmt: skip


class Device:
    """One GPU: its primary context (shared with any other library in the process) and its properties."""

    def __init__(self, ordinal: int) -> None:
        driver = load_driver()
        count = check_status(driver.cuDeviceGetCount())
        if not 0 <= ordinal < count:
            raise BackendError(f"There is no GPU number {ordinal}: this machine has {count} (0 to {count - 1}). Choose one with --device=N.")
        self.ordinal = ordinal
        self.lost = ""  # the reason, after a kernel has failed
        self.handle = check_status(driver.cuDeviceGet(ordinal))
        self.context = check_status(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.make_current()
        self.name = check_status(driver.cuDeviceGetName(128, self.handle)).split(b"\0")[0].decode()
        number = driver.CUdevice_attribute
        self.capability = (
            self._attribute(number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.multiprocessors = self._attribute(number.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_memory = self._attribute(number.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.l2_bytes = self._attribute(number.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)

    def _attribute(self, which: Any) -> int:
        return int(check_status(load_driver().cuDeviceGetAttribute(which, self.handle)))

    @property
    def bus_id(self) -> str:
        """The PCI address, which identifies this GPU in NVML too (CUDA_VISIBLE_DEVICES renumbers the ordinals)."""
        return check_status(load_driver().cuDeviceGetPCIBusId(32, self.handle)).split(b"\0")[0].decode()

    @property
    def arch(self) -> str:
        """The target to compile for: "sm_90a" on Hopper (wgmma needs the "a"), else "sm_XY"."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    def make_current(self) -> None:
        """Binds this GPU's context to the calling thread; required once per launching thread. Raises LostContext after a fault."""
        _check_process()
        if self.lost:
            raise LostContext(self.lost)
        _here.device = self
        check_status(load_driver().cuCtxSetCurrent(self.context))

    def peaks(self) -> dict[str, float]:
        """Peak rates of the hardware: bytes per second from memory, operations per second by type ("f16": tensor cores, dense).

        From the driver's clocks and bus widths (a multiply-add is two operations); 0.0 if the hardware has no unit for a type.
        """
        number = load_driver().CUdevice_attribute
        clock = 1e3 * self._attribute(number.CU_DEVICE_ATTRIBUTE_CLOCK_RATE)
        memory = 1e3 * self._attribute(number.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)
        width = self._attribute(number.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
        plain, f16, f8 = _PER_CLOCK.get(self.capability, (128, 0, 0))  # operations per multiprocessor and clock
        each = clock * self.multiprocessors
        types = {"f32": plain, "tf32": f16 / 2, "f16": f16, "bf16": f16, "i8": 2 * f16, "f8": f8}
        return {"bytes": 2 * memory * width / 8, **{k: each * v for k, v in types.items()}}

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        return check_status(load_driver().cuMemGetInfo())

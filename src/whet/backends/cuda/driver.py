"""The CUDA driver, loaded when first needed: every call checked, every failure told in words.

Nothing here imports the `cuda` packages when this module is imported, so that whet runs on machines without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

from whet.errors import BackendError

MIN_DRIVER = 12000  # thread-block clusters, programmatic dependent launch and tensor maps came with CUDA 12


def _missing(what: str, error: Exception) -> BackendError:
    return BackendError(
        f"{what} cannot be loaded ({error}). The CUDA backend needs it. Install the extra with `pip install whet[cuda]`, or use --backend=cpu."
    )


@functools.cache
def cu() -> Any:
    """The driver's binding module, initialized. BackendError without the package, the driver or a GPU."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise _missing("the package cuda-bindings", error) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the binding found no libcuda.so.1
        raise _missing("the NVIDIA driver (libcuda.so.1)", error) from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise BackendError("No NVIDIA GPU is visible. Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --backend=cpu.")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"The NVIDIA driver did not start ({status.name}). Check `nvidia-smi`, or use --backend=cpu.")
    version = _plain(driver, driver.cuDriverGetVersion())
    if version < MIN_DRIVER:
        raise BackendError(
            f"The NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; whet needs {MIN_DRIVER // 1000}.0 or newer. "
            "Update the driver, or use --backend=cpu."
        )
    return driver


def _plain(driver: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(_describe(driver, status))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _describe(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    words = text.decode() if isinstance(text, bytes) else str(text)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return f"The GPU is out of memory ({words}). Lower --memPoolSize or the batch, or end other programs on this GPU (`nvidia-smi` lists them)."
    sticky = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS"}
    if status.name in sticky:
        return (
            f"A GPU kernel failed ({status.name}: {words}). This process's GPU context is lost: load the engine in a new process, "
            "and report the network with the output of `whet explain`."
        )
    return f"The CUDA driver refused a call ({status.name}: {words})."


def ok(answer: tuple[Any, ...]) -> Any:
    """The values of a driver call's answer (None, one value, or a tuple); BackendError when its status is not success."""
    return _plain(cu(), answer)


def available() -> str | None:
    """None when a GPU can be used here, else the reason why not."""
    try:
        cu()
    except BackendError as error:
        return str(error)
    return None


@functools.cache
def device(ordinal: int = 0) -> Device:
    """The GPU number `ordinal`, its primary context made current."""
    return Device(ordinal)


class Device:
    """One GPU: its primary context (shared with any other library in the process) and what it can do."""

    def __init__(self, ordinal: int) -> None:
        driver = cu()
        count = ok(driver.cuDeviceGetCount())
        if not 0 <= ordinal < count:
            raise BackendError(f"There is no GPU number {ordinal}: this machine shows {count} (0 to {count - 1}). Choose one with --device=N.")
        self.ordinal = ordinal
        self.handle = ok(driver.cuDeviceGet(ordinal))
        self.context = ok(driver.cuDevicePrimaryCtxRetain(self.handle))
        self.make_current()
        self.name = ok(driver.cuDeviceGetName(128, self.handle)).split(b"\0")[0].decode()
        number = driver.CUdevice_attribute
        self.capability = (
            self._attribute(number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(number.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.multiprocessors = self._attribute(number.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_memory = self._attribute(number.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.l2_bytes = self._attribute(number.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)

    def _attribute(self, which: Any) -> int:
        return int(ok(cu().cuDeviceGetAttribute(which, self.handle)))

    @property
    def arch(self) -> str:
        """The target to compile for: "sm_90a" on Hopper (wgmma needs the "a"), else "sm_XY"."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    def make_current(self) -> None:
        """Bind this GPU's context to the calling thread; each thread that launches must do so once."""
        ok(cu().cuCtxSetCurrent(self.context))

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        return ok(cu().cuMemGetInfo())

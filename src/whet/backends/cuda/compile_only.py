"""Compilation targets without a GPU: properties of one device per architecture, from NVIDIA's data sheets and the CUDA C++ guide.

Kernels are planned and compiled for them; nothing can be allocated or run. With a GPU, the properties reported by its driver are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whet.backends._base import Backend, Buffer, Recorder
from whet.backends.cuda import of_architecture
from whet.errors import BackendError

_KIB, _MIB = 1 << 10, 1 << 20
#: architecture -> multiprocessors, bytes of shared memory a block can use (CUDA C++ Programming Guide, table of compute capabilities), L2 bytes
DEVICES = {
    "sm_80": (108, 163 * _KIB, 40 * _MIB),  # A100
    "sm_86": (84, 99 * _KIB, 6 * _MIB),  # A40
    "sm_89": (142, 99 * _KIB, 48 * _MIB),  # L40
    "sm_90": (132, 227 * _KIB, 50 * _MIB),  # H100 SXM, H200
    "sm_100": (148, 227 * _KIB, 126 * _MIB),  # B200
}


class CompileOnlyGpu(Backend):
    """A GPU architecture as a target for planning and compilation. `properties` override single capabilities (`multiprocessors=84`)."""

    name = "cuda"

    def __init__(self, architecture: str = "sm_90", **properties: Any) -> None:
        """Raises BackendError for an architecture that is not in DEVICES."""
        if architecture not in DEVICES:
            raise BackendError(f"no device of {architecture} is known; there are {', '.join(DEVICES)}")
        multiprocessors, shared, l2 = DEVICES[architecture]
        known = of_architecture((int(architecture[3:-1]), int(architecture[-1])), multiprocessors, shared, l2)
        self.capabilities = replace(replace(known, executes=False), **properties)
        self.architecture = architecture

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        raise BackendError(f"{self.architecture} is a target for compilation: it has no memory")

    def stream(self) -> Recorder:
        raise BackendError(f"{self.architecture} is a target for compilation: it runs nothing")

    def seconds(self, executable: Any, repeats: int) -> list[float]:
        raise BackendError(f"{self.architecture} is a target for compilation: it runs nothing")

    def key(self) -> str:
        return f"compile only | {self.architecture} x{self.capabilities.multiprocessors}"

    def describe(self) -> dict[str, Any]:
        return {"backend": self.name, "model": f"{self.architecture}, compile only", "multiprocessors": self.capabilities.multiprocessors}

"""A simulated Hopper GPU: it plans and times like a device and computes nothing, so that CUDA builds run on machines without a GPU.

Its kernels are those of the CUDA backend; none is compiled. The time of a launch is proportional to its bytes, so 8-bit kernels are faster
than 16-bit ones, and those faster than 32-bit ones; `slow` raises the cost of 8-bit layers by name.
"""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from whet.backends import BACKENDS, Backend, Buffer, Call, Executable
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.tactics import load_tactics
from whet.tactics.cuda._device.kernel import GpuKernel

BYTES_PER_S, LAUNCH_S = 1e9, 1e-6


class StandInCall(Call):
    """A launch of known cost."""

    launches = ()

    def __init__(self, seconds: float):
        self.cost = seconds

    def run(self) -> None:
        """Does nothing: nothing is computed."""

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Does nothing: the cost does not depend on addresses."""


class StandInExecutable(Executable):
    """Launches with costs on a simulated clock, executed instantly."""

    def __init__(self, calls: list):
        self.calls = list(calls)

    def run(self) -> None:
        """Does nothing."""

    def run_timed(self) -> list[float]:
        return [c.cost for c in self.calls]


class StandInStream:
    def __init__(self) -> None:
        self.calls: list = []

    def record(self, call) -> None:
        self.calls.append(call)

    def finish(self) -> StandInExecutable:
        return StandInExecutable(self.calls)


class StandInGpu(Backend):
    """Device memory is host memory; results are zeros."""

    name = "cuda"
    capabilities = replace(
        CompileOnlyGpu().capabilities, executes=True, overlapping_launches=False, compiles_ahead=False, cold_cache_clock=False, user_streams=False,
        reference_products=False, cache_bytes={},
    )  # fmt: skip

    def __init__(self, device: int | None = None, threads: int = 0, **_):
        self.threads = threads or 1

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        memory = np.zeros(nbytes + 64, np.uint8)
        return Buffer(memory.ctypes.data, nbytes, memory[:nbytes], memory)

    def stream(self) -> StandInStream:
        return StandInStream()

    def seconds(self, executable: StandInExecutable, repeats: int) -> list[float]:
        return [sum(executable.run_timed())] * repeats

    def key(self) -> str:
        return "stand-in GPU"

    def describe(self) -> dict:
        return {"backend": "cuda", "model": "stand-in GPU"}


@pytest.fixture
def standin_gpu(monkeypatch):
    """Replaces the CUDA backend; yields {part of a layer's or kernel's name: factor of its time}, initially empty."""
    load_tactics("cuda")
    slow: dict[str, float] = {}
    made = GpuKernel.__init__

    def noting(self, layer, signature, make, **options):
        made(self, layer, signature, make, **options)
        quantized = [o.dtype.name for o in (*signature.inputs, *signature.outputs) if o is not None and o.dtype.bits == 8]
        self.factor = prod(f for part, f in slow.items() if quantized and part in f"{layer.name} {self.implementation}")

    def enqueue(self, args, stream):
        moved = sum(self.inputs) + sum(self.outputs) + sum(p.nbytes for p in self.packed)
        stream.record(StandInCall(self.factor * (LAUNCH_S + moved / BYTES_PER_S)))

    monkeypatch.setattr(GpuKernel, "__init__", noting)
    monkeypatch.setattr(GpuKernel, "enqueue", enqueue)
    monkeypatch.setitem(BACKENDS, "cuda", StandInGpu)
    return slow

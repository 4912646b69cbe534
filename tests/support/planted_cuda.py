"""Wrong CUDA kernels: the texts of real kernels with one fault each, for a GPU (through NVRTC) and for the host (through a C++ compiler).

Faults are put into the kernels of one value per thread that compute any convolution, product and transposed convolution. Each edit must meet
its line exactly once, so that a change of a kernel's text does not leave it correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from support.host_cuda import HostLaunch, compile_launches
from support.standin_gpu import StandInGpu
from whet.backends import BACKENDS, Call
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.launch import Launch, Module
from whet.network import static_shape
from whet.ops import run_layer
from whet.tactics import TACTICS, load_tactics
from whet.tactics.cuda._device.arguments import Arguments
from whet.tactics.cuda._device.kernel import GpuKernel
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv import _conv_transpose, conv_generic

#: kinds of faults in the order of their numbers; 0 has none
FAULTS = (
    "correct", "last element", "last channel", "x <= 0", "smallest batch", "largest batch", "stale accumulator", "truncates", "swapped channels",
    "ignores the bias", "intermittent", "NaN for zeros", "saturates",
)  # fmt: skip
TACTICS_OF_FAULTS = ("cuda/conv_generic", "cuda/conv_transpose_generic")
_OPS = {"Conv", "Gemm", "MatMul", "ConvTranspose"}
_HELPERS = """
MEMORY float planted_memory[16384];
MEMORY unsigned planted_runs;
DEV float planted_load(float x, bool& seen) {
    seen = seen || x != 0.f;
    return PLANTED == 3 && x <= 0.f ? 0.9f * x : x;
}
DEV long long planted_place(long long i, int k) { return PLANTED == 8 && k < 2 ? i + 1 - 2 * k : i; }
DEV float planted_value(float y, long long i, int k, int channels, long long count, bool seen) {
    if (PLANTED == 1 && i == count - 1) return 0.f;
    if (PLANTED == 2 && k == channels - 1) return 1.01f * y;
    if ((PLANTED == 4 || PLANTED == 5) && count == COUNT && k == 0) return 1.01f * y;
    if (PLANTED == 6) return planted_memory[i] = y + 0.01f * planted_memory[i];
    if (PLANTED == 7) return __int_as_float(__float_as_int(y) & 0xffffe000);
    if (PLANTED == 10 && i == 0) return 0x6b2d >> (planted_runs++ & 15) & 1 ? y + 0.05f : y;
    if (PLANTED == 11 && !seen) return __int_as_float(0x7fc00000);
    if (PLANTED == 12) return y > 2000.f ? 2000.f : y < -2000.f ? -2000.f : y;
    return y;
}
"""
_BIAS = "PLANTED == 9 ? 0.f : a.bias[k]; bool seen = false"
_EDITS = {
    "conv_generic.cu": (
        ('extern "C" __global__', _HELPERS + 'extern "C" __global__'),
        ("float sum = FACTOR ? 0.f : a.bias[k]", f"float sum = {_BIAS}"),
        ("load1<FROM>(a.input, from + c)", "planted_load(load1<FROM>(a.input, from + c), seen)"),
        (
            "store1<TO>(a.out, i, FACTOR ? y * a.per_step + a.zero : y)",
            "store1<TO>(a.out, planted_place(i, k), planted_value(y, i, k, a.k, a.count, seen))",
        ),
    ),
    "conv_transpose.cu": (
        ("// The input row or column", _HELPERS + "// The input row or column"),
        ("    float sum = a.bias[k]", f"    float sum = {_BIAS}"),
        ("load1<TYPE>(a.input, from + c)", "planted_load(load1<TYPE>(a.input, from + c), seen)"),
        (
            "store1<TYPE>(a.out, i, finish(a, sum, a.has_residual ? load1<TYPE>(a.residual, i) : 0.f))",
            "store1<TYPE>(a.out, planted_place(i, k), "
            "planted_value(finish(a, sum, a.has_residual ? load1<TYPE>(a.residual, i) : 0.f), i, k, a.k, a.count, seen))",
        ),
    ),
}


def edit(file: str, text: str, memory: str) -> str:
    """A kernel's text with the faults, which the constants PLANTED and COUNT select; `memory` declares device variables."""
    for old, new in _EDITS[file]:
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}: the fault must be put elsewhere"
        text = text.replace(old, new.replace("MEMORY", memory))
    return text


def planted_text(file: str, constants: Mapping[str, Any]) -> str:
    """The whole text for NVRTC."""
    return edit(file, emit_kernel_source(file, constants), "__device__")


def constants_of(fault: int, count: int) -> dict[str, int]:
    """The constants of a fault; `count` is the number of values at the batch in which alone it occurs."""
    return {"PLANTED": fault, "COUNT": count if fault in (4, 5) else -1}


def leave_generic_kernels(monkeypatch) -> None:
    """Removes all other CUDA tactics of convolutions and products."""
    load_tactics("cuda")
    for name, t in list(TACTICS.items()):
        if name.startswith("cuda/") and set(t.ops) & _OPS and name not in TACTICS_OF_FAULTS:
            monkeypatch.delitem(TACTICS, name)


def plant_on_gpu(monkeypatch, fault: int, count: int, arch: str) -> None:
    """Launches of the generic kernels run the text with a fault."""
    kernels: dict[tuple, Any] = {}

    def launch(entry: str, arguments: Arguments, constants: Mapping[str, Any], grid, block: int, *, label: str = "", **_: Any) -> Launch:
        given = {**constants, **constants_of(fault, count)}
        key = (arguments.kernel_file, *sorted(given.items()))
        if key not in kernels:
            kernels[key] = Module(compile_cubin(planted_text(arguments.kernel_file, given), name=arguments.kernel_file, arch=arch)).kernel(entry, 0)
        return Launch(kernels[key], grid, block, arguments.pack(), label=label)

    leave_generic_kernels(monkeypatch)
    monkeypatch.setattr(conv_generic, "launch", launch)
    monkeypatch.setattr(_conv_transpose, "launch", launch)


def compile_faults(counts: Mapping[str, tuple[int, int]]):
    """Compiles the kernels with every fault for the host, in one library; `counts`: values at the smallest and the largest batch, by operation."""
    conv = {"FROM": 0, "TO": 0, "ADD": 0, "FACTOR": 0, "ACT": 0}
    transposed = {"TYPE": 0, "VEC": 1, "ACT": 0}
    launches = [
        HostLaunch(file, "direct", {**constants, **constants_of(fault, count)}, b"", 0, 0)
        for file, constants in (("conv_generic.cu", conv), ("conv_transpose.cu", transposed))
        for fault in range(len(FAULTS))
        for count in {pair[fault == 5] for pair in counts.values()}
    ]
    return compile_launches(launches, lambda file, text: edit(file, text, "static"))


class HostCall(Call):
    """One layer on the host: the generic kernels as compiled C++, other layers by the reference."""

    launches = ()
    cost = 1e-6

    def __init__(self, kernel: Any, args: Any, run_launches: Any):
        self.kernel, self.args, self.run_launches = kernel, args, run_launches

    def run(self) -> None:
        """Computes the layer's outputs in the memory at their addresses."""
        kernel, args = self.kernel, self.args
        if kernel.implementation.startswith("direct"):
            self.run_launches(kernel.launches(args))
            return
        layer, signature = kernel.layer, kernel.signature
        ins = [
            None if t is None else t.array() if t.is_constant else view(at, t, o).copy()
            for t, at, o in zip(layer.inputs, args.inputs, signature.inputs, strict=True)
        ]
        for y, t, at, o in zip(run_layer(layer, ins), layer.outputs, args.outputs, signature.outputs, strict=True):
            view(at, t, o)[...] = y

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Moves an operand."""
        raise NotImplementedError("an engine under verification keeps the addresses of its launches")


def view(address: int, t: Any, operand: Any) -> np.ndarray:
    """A tensor in host memory, with channels second."""
    import ctypes

    shape = static_shape(t.shape)
    dtype = np.dtype(operand.dtype.numpy)
    flat = np.frombuffer((ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(address), dtype)
    if operand.format == "linear":
        return flat.reshape(shape)
    assert operand.format == "nhwc"
    n, c, h, w = shape
    return flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)


def plant_on_host(monkeypatch, fault: int, count: int, run_launches: Any) -> None:
    """Replaces the GPU by the host, and the generic kernels by those with a fault."""
    leave_generic_kernels(monkeypatch)
    made = GpuKernel.__init__

    def noting(self, layer, signature, make, **rest):
        made(self, layer, signature, make, **rest)
        self.layer, self.signature = layer, signature

    def launch(entry: str, arguments: Arguments, constants: Mapping[str, Any], grid, block: int, **_: Any) -> HostLaunch:
        return HostLaunch.of(entry, arguments, {**constants, **constants_of(fault, count)}, grid, block)

    monkeypatch.setattr(conv_generic, "launch", launch)
    monkeypatch.setattr(_conv_transpose, "launch", launch)
    monkeypatch.setattr(GpuKernel, "__init__", noting)
    monkeypatch.setattr(GpuKernel, "enqueue", lambda self, args, stream: stream.record(HostCall(self, args, run_launches)))
    monkeypatch.setitem(BACKENDS, "cuda", HostGpu)


class HostStream:
    """Records calls that the host executes."""

    def __init__(self) -> None:
        self.calls: list = []

    def record(self, call) -> None:
        self.calls.append(call)

    def finish(self):
        return HostExecutable(self.calls)


class HostExecutable:
    """Calls that run one after the other."""

    def __init__(self, calls: list):
        self.calls = list(calls)

    def run(self) -> None:
        for c in self.calls:
            c.run()

    def run_timed(self) -> list[float]:
        self.run()
        return [c.cost for c in self.calls]


class HostGpu(StandInGpu):
    """The simulated GPU, whose launches run on the host."""

    def stream(self) -> HostStream:
        return HostStream()

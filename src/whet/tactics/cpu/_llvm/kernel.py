"""Base classes of the tactics with JIT-compiled kernels, and their shared 8-bit arithmetic.

A kernel's function takes one context, an array of 64-bit words: its own words, then a thread's share of items and the packed operand, if any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import DType, Layer
from whet.tactics._base import Args, Packed, Signature, Stream, Tactic, count_stored_bytes
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import INT8, INT32, Function, Pointer, Value
from whet.tactics.cpu._llvm.registers import why_no_registers

LAST_WORDS = ("share", "packed")  # of every context


class CompiledTactic(Tactic):
    """A tactic with a JIT-compiled kernel. Results equal the op's, except for ties in rounding in some tactics."""

    needs_registers = False  # its accumulators fill the registers of `get_registers`

    def unavailable(self) -> str | None:
        reason = why_no_registers() if self.needs_registers else None
        return reason or jit.why_unavailable()

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or jit.why_unavailable()

    def library_version(self) -> str:
        return jit.get_version()


class CompiledKernel:
    """A planned launch of one function on `count` threads of the pool, or on one thread if `work` is at most `serial_work`."""

    scratch, rtol, deterministic = 0, 0.0, True
    packed: tuple[Packed, ...] = ()
    implementation: str
    serial_work: int
    """Elements or multiplications that one thread computes in the time of starting the others."""

    def __init__(self, layer: Layer, signature: Signature, work: int, count: int) -> None:
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.threads = count if work > self.serial_work else 1

    def launch(
        self, stream: Stream, ir: str | jit.Generated, name: str, args: Args, words: Sequence[tuple[str, int] | int], items: int, step: int = 1
    ) -> None:
        """Records a launch of the function `name` of `ir` over `items`, shared in multiples of `step`. Each word is an operand of the layer
        ("input" | "output", index) or an integer."""
        addresses = {"input": args.inputs, "output": args.outputs}
        share = -(-items // (self.threads * step)) * step
        context = [*(w if isinstance(w, int) else addresses[w[0]][w[1]] for w in words), share, *args.packed]
        operands = {k: w for k, w in enumerate(words) if not isinstance(w, int)}
        stream.record(jit.ParallelCall(jit.load_function(ir, name), context, operands, self.threads, self.implementation, step=step))


def get_integer_range(dtype: DType) -> tuple[int, int]:
    """Lowest and highest value of an 8-bit integer type."""
    return (-128, 127) if dtype.name == "i8" else (0, 255)


def make_packed_parameters(*numbers: float) -> Packed:
    """Scalar parameters of a kernel as one packed f32 operand."""
    line = np.array(numbers, np.float32)
    return Packed(f"line|{line.tobytes().hex()}", line.nbytes, lambda: line.view(np.uint8))


@dataclass(frozen=True)
class Parameter:
    """A scalar parameter, and its broadcast to 16 lanes."""

    scalar: Value
    vector: Value

    def like(self, value: Value) -> Value:
        """The scalar or the vector, matching the lanes of `value`."""
        return self.scalar if value.lanes == 1 else self.vector


def load_parameters(packed: Pointer, count: int) -> list[Parameter]:
    loaded = []
    for k in range(count):
        scalar = packed.load(k)
        loaded.append(Parameter(scalar, scalar.broadcast()))
    return loaded


def to_int8(f: Function, value: Value, zero: Parameter, low: Parameter, high: Parameter) -> Value:
    """Quantizes values divided by the scale: rounds half to even, adds `zero`, clamps to [`low`, `high`] (NaN gives `low`)."""
    shifted = f.math("rint", value) + zero.like(value)
    clamped = f.minimum(f.maximum(shifted, low.like(value)), high.like(value))
    return clamped.convert("fptosi", INT32).convert("trunc", INT8)

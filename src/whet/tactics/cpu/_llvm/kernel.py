"""What kernels of our own share: bytes and threads of a planned launch, the launch itself, and pieces of LLVM IR that several of them have.

A kernel's function takes one context, an array of 64-bit words: its own ones, at the end the thread's share of items and the packed operand
(jit.opening reads them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.network import DType, Layer
from whet.tactics._base import Args, Packed, Signature, Stream, Tactic, stored_bytes
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.onednn._nonfinite import Reference

LAST_WORDS = ("share", "packed")  # what every context ends in


class OwnTactic(Tactic):
    """A tactic whose kernel is compiled in the process. Its numbers are the op's own, but for ties of roundings where it says so."""

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or jit.available()

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing: NaN and infinities give what the ops give."""
        return [{}]

    def library_version(self) -> str:
        return jit.version()


class OwnKernel:
    """A planned launch of one function on the threads of the pool; `small` is the work that one thread has done before the others are there."""

    scratch, rtol, deterministic = 0, 0.0, True
    packed: tuple[Packed, ...] = ()
    implementation: str

    def __init__(self, layer: Layer, signature: Signature, work: int, small: int, count: int) -> None:
        self.inputs, self.outputs = stored_bytes(layer, signature)
        self.threads = count if work > small else 1

    def launch(self, stream: Stream, ir: str, name: str, args: Args, words: Sequence[tuple[str, int] | int], items: int, step: int = 1) -> None:
        """Records `name` of `ir` for so many items, shared out in multiples of `step`. Of the function's own words an operand of the layer
        is ("input" | "output", index), a number itself."""
        at = {"input": args.inputs, "output": args.outputs}
        share = -(-items // (self.threads * step)) * step
        context = [*(w if isinstance(w, int) else at[w[0]][w[1]] for w in words), share, args.packed[0]]
        operands = {k: w for k, w in enumerate(words) if not isinstance(w, int)}
        stream.record(jit.ParallelCall(jit.address(ir, name), context, operands, self.threads, self.implementation, step=step))


def integer_range(dtype: DType) -> tuple[int, int]:
    """Lowest and highest number of an 8-bit integer type."""
    return (-128, 127) if dtype.name == "i8" else (0, 255)


def packed_numbers(*numbers: float) -> Packed:
    """Some numbers that a kernel reads, as one packed operand of f32."""
    line = np.array(numbers, np.float32)
    return Packed(f"line|{line.tobytes().hex()}", line.nbytes, lambda: line.view(np.uint8))


@dataclass(frozen=True)
class Lanes:
    """IR on `count` numbers at once, or on one. Names of values end in `s`, so that several pieces can stand in one function."""

    count: int

    def of(self, kind: str) -> str:
        """The type of so many numbers of a kind."""
        return kind if self.count == 1 else f"<{self.count} x {kind}>"

    @property
    def rint(self) -> str:
        """LLVM's function that rounds to the nearest, ties to even."""
        return "llvm.rint.f32" if self.count == 1 else f"llvm.rint.v{self.count}f32"

    def constant(self, name: str) -> str:
        """What `numbers` calls a number of the packed operand."""
        return f"%{name}" if self.count == 1 else f"%{name}s"

    def stored(self, value: str, s: str) -> str:
        """%z<s>: the 8-bit integers of real numbers in steps of the result: rounded, `zero` added, within `low` and `high` (NaN gives `low`)."""
        f, b, i, q = (self.of(t) for t in ("float", "i1", "i32", "i8"))
        zero, low, high = (self.constant(n) for n in ("zero", "low", "high"))
        return f"""
  %r{s} = call {f} @{self.rint}({f} {value})
  %o{s} = fadd {f} %r{s}, {zero}
  %a{s} = fcmp ogt {f} %o{s}, {low}
  %b{s} = select {b} %a{s}, {f} %o{s}, {f} {low}
  %c{s} = fcmp olt {f} %b{s}, {high}
  %e{s} = select {b} %c{s}, {f} %b{s}, {f} {high}
  %i{s} = fptosi {f} %e{s} to {i}
  %z{s} = trunc {i} %i{s} to {q}"""


def numbers(names: Sequence[str], wide: Lanes) -> str:
    """IR that reads the packed operand's numbers from %line: each by its name, and as `wide` of it by its name with an s."""
    f = wide.of("float")
    return "\n".join(
        f"  %{n}.p = getelementptr float, float* %line, i64 {k}\n  %{n} = load float, float* %{n}.p\n"
        f"  %{n}.one = insertelement {f} undef, float %{n}, i32 0\n"
        f"  %{n}s = shufflevector {f} %{n}.one, {f} undef, <{wide.count} x i32> zeroinitializer"
        for k, n in enumerate(names)
    )


def rounding(*lanes: Lanes) -> str:
    """Declarations of the functions that `Lanes.stored` calls."""
    return "\n".join(f"declare {x.of('float')} @{x.rint}({x.of('float')})" for x in lanes)

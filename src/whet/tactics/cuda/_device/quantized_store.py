"""How a kernel that computes in floating point stores its result: as it is, in 8 bits, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizedStore:
    """`kind` is the 8-bit type's code in vector.cuh (0: none); real = (stored - zero) / per_step. `keeps`: the result is stored in floating point
    too, as the first of two outputs."""

    kind: int = 0
    per_step: float = 1.0
    zero: float = 0.0
    keeps: bool = True

    @property
    def constants(self) -> dict[str, int]:
        """STORED and KEEPS of the kernels."""
        return {"STORED": self.kind, "KEEPS": int(self.keeps)}

    def split_outputs(self, outputs: Sequence[int]) -> tuple[int, int]:
        """The addresses of the floating-point and of the quantized result; 0: not stored."""
        return outputs[0] if self.keeps else 0, outputs[-1] if self.kind else 0


PLAIN_RESULT = QuantizedStore()

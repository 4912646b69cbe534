"""Gemm, MatMul and 1x1 convolutions of one pixel with a constant matrix, for one to three rows, in bf16: weights are widened in registers.

Measured: docs/results/cpu.md (Linear layers at batch 1, against a read of the same weights).
"""

from __future__ import annotations

from whet.network import BF16
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.packing import why_no_small_float
from whet.tactics.cpu.linear._row_kernel import RowTactic


@tactic
class LinearRowBf16(RowTactic):
    stored = BF16

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_small_float(BF16)

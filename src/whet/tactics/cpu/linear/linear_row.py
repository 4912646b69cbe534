"""Gemm, MatMul and 1x1 convolutions of one pixel with a constant matrix, for one to three rows, in f32.

Measured: docs/results/cpu.md (Linear layers at batch 1, against a read of the same weights).
"""

from __future__ import annotations

from whet.network import F32
from whet.tactics._base import tactic
from whet.tactics.cpu.linear._row_kernel import RowTactic


@tactic
class LinearRow(RowTactic):
    stored = F32

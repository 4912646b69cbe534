"""Gemm and MatMul with a constant matrix on the right, in f16, with sums of short runs in f16.

Measured: docs/notes/cpu_kernels.md (FP16 with AVX512-FP16).
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._half_kernel import HalfTactic
from whet.tactics.cpu.conv._product_tactic import LinearProduct


@tactic
class HalfLinear(HalfTactic, LinearProduct):
    pass

"""Gemm and MatMul with a constant matrix on the right, in bf16, by AMX tiles.

Measured: docs/notes/cpu_kernels.md (BF16 with AMX).
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._amx_kernel import AmxTactic
from whet.tactics.cpu.conv._product_tactic import LinearProduct


@tactic
class AmxLinear(AmxTactic, LinearProduct):
    pass

"""Convolutions in bf16, channels last, by AMX tiles. Images of windows are copied with their padding first.

Measured: docs/notes/cpu_kernels.md (BF16 with AMX).
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._amx_kernel import AmxTactic
from whet.tactics.cpu.conv._product_tactic import ConvProduct


@tactic
class AmxConv(AmxTactic, ConvProduct):
    pass

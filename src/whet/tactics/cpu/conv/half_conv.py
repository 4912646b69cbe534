"""Convolutions in f16, channels last, with sums of short runs in f16. Images of windows are copied with their padding first.

Measured: docs/notes/cpu_kernels.md (FP16 with AVX512-FP16).
"""

from __future__ import annotations

from whet.tactics._base import tactic
from whet.tactics.cpu.conv._half_kernel import HalfTactic
from whet.tactics.cpu.conv._product_tactic import ConvProduct


@tactic
class HalfConv(HalfTactic, ConvProduct):
    pass

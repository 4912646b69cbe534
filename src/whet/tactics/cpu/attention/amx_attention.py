"""Attention of bf16 values as one kernel: products by AMX tiles, an f32 softmax between them.

Measured: docs/notes/cpu_kernels.md (Attention).
"""

from __future__ import annotations

from whet.network import BF16, Layer
from whet.tactics._attention import Heads
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.amx import why_no_tiles
from whet.tactics.cpu._llvm.packing import why_no_small_float
from whet.tactics.cpu.attention.attention import AttentionTactic


@tactic
class AmxAttention(AttentionTactic):
    stored = BF16

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_small_float(BF16) or why_no_tiles()

    def why_not_heads(self, layer: Layer, heads: Heads) -> str | None:
        if reason := super().why_not_heads(layer, heads):
            return reason
        if not heads.turned and (heads.size % 2 or heads.k.strides[-1] % 2):
            return "takes keys with an even number of elements, an even number apart"
        return None

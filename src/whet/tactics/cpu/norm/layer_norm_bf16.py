"""LayerNormalization of bf16 rows with constant scale and bias, computed in f32.

oneDNN's kernel for bf16 takes four times as long as reading and writing the rows.

Not measured yet: BF16 engines of transformers on CPUs with AVX512-BF16.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import BF16, Layer
from whet.tactics._base import Signature, tactic
from whet.tactics.cpu._llvm.packing import why_no_small_float
from whet.tactics.cpu.norm.rms_norm import RmsNorm


@tactic
class LayerNormBf16(RmsNorm):
    ops = ("LayerNormalization",)
    stored = BF16

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_small_float(self.stored)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        return [] if self.unavailable() else super().signatures(layer, backend)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

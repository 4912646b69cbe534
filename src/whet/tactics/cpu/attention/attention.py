"""Attention in f32 as one kernel without a library: scores, softmax and values of a block of queries stay in the cache of one core.

Transposes around it are strides of its operands; scale and mask are part of the softmax.

Measured: docs/notes/cpu_kernels.md (Attention).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.backends import Backend
from whet.network import F32, DType, Layer
from whet.tactics._attention import Heads, match_attention
from whet.tactics._base import Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu.attention._attention_kernel import AttentionKernel
from whet.tactics.cpu.onednn._kernel import RTOL, is_static


class AttentionTactic(CompiledTactic):
    """A tactic of these kernels: q, k, v and the result have the same storage type, masks are f32."""

    composites = ("Attention",)
    what = "attention"
    stored: DType = F32

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if not is_static(layer):
            return None
        heads = match_attention(layer)
        return heads if isinstance(heads, str) else self.why_not_heads(layer, heads)

    def why_not_heads(self, layer: Layer, heads: Heads) -> str | None:
        read = [layer.needs(v.place) for v in (heads.q, heads.k, heads.v)]
        if any(t.dtype not in (F32, self.stored) for t in (*read, layer.outputs[0])):
            return f"computes in {self.stored}"
        if any(t.is_constant for t in read):
            return "an operand of its products is constant"
        mask = heads.mask
        if mask is not None and (layer.needs(mask.place).dtype != F32 or mask.strides[-1] not in (0, 1)):
            return "takes f32 masks whose keys are next to each other"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.unavailable() or self.why_not(layer) or not is_static(layer):
            return []
        heads = match_attention(layer)
        assert isinstance(heads, Heads)
        inputs: list[Operand | None] = [None] * len(layer.inputs)
        for view, dtype in ((heads.q, self.stored), (heads.k, self.stored), (heads.v, self.stored), (heads.mask, F32)):
            if view is not None and not layer.needs(view.place).is_constant:
                inputs[view.place] = Operand("linear", dtype)
        return [Signature(tuple(inputs), (Operand("linear", self.stored),))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Callable]]:
        """Keys and values that a causal mask hides from a group of queries are not read: NaN and infinities among them are lost there."""
        heads = match_attention(layer)
        skips = isinstance(heads, Heads) and heads.causal is not None
        return [{}, {"Add": _hide_scores, "MatMul": _skip_values}] if skips else [{}]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> AttentionKernel:
        heads = match_attention(layer)
        if isinstance(heads, str) or (reason := self.unavailable() or self.why_not(layer)):
            raise PlanRefused(heads if isinstance(heads, str) else reason or "")
        return AttentionKernel(layer, signature, heads, self.stored, RTOL[self.stored.name], backend.threads)


def _hide_scores(own: Callable, layer: Layer, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The masked scores, -infinity where the mask is, whatever the score."""
    masked: np.ndarray = own(layer, scores, mask)
    return np.where((scores == -np.inf) | (mask == -np.inf), np.asarray(-np.inf, masked.dtype), masked)


def _skip_values(own: Callable, layer: Layer, x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The product, without NaN and infinities that are multiplied by nothing but zeros."""
    product: np.ndarray = own(layer, x, values)
    used = own(layer, (x != 0).astype(x.dtype), (~np.isfinite(values)).astype(values.dtype))
    return np.where(used > 0, product, own(layer, x, np.where(np.isfinite(values), values, np.zeros_like(values))))


@tactic
class Attention(AttentionTactic):
    version = 2

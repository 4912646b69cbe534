"""Null tactic for any op, row-major and slow: the fallback."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Config, Signature, Tactic, tactic
from whet.tactics.null._cost import NullKernel, find_uniform_signature


@tactic
class NullAny(Tactic):
    ops = ("*",)
    fallback = True

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        return [s for s in [find_uniform_signature(layer, "linear")] if s is not None]

    def refuses(self, layer: Layer, signature: Signature, backend) -> str | None:
        return "moves values between formats, which null/reformat does" if layer.op == "Reformat" else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        return NullKernel(layer, signature, "null_any", slow=4.0)

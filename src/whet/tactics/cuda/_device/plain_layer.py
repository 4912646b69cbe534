"""Base of tactics for single layers: they fuse nothing, and all inputs but the first are constants."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Tactic


class UnfusedTactic(Tactic):
    """A tactic for unfused layers; `constants` names the inputs after the first in messages."""

    constants = ""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        computed = self.constants and any(t is not None and not t.is_constant for t in layer.inputs[1:])
        return f"{self.constants} computed at run time" if computed else None

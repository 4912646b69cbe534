"""Base of the tactics of quantized layers: the layer is matched once, and subclasses see quantized, static layers only."""

from __future__ import annotations

from abc import abstractmethod

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Signature, Tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.kernel import all_static
from whet.tactics.cuda.quantized._quantized import match_parts


class QuantizedTactic(Tactic):
    """A tactic for quantized layers; subclasses say why they do not take one (`unfit`), and how its operands may be stored (`stored`)."""

    quantized = True
    float8 = False  # also takes layers with float8 operands

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        parts = match_parts(layer)
        if isinstance(parts, str):
            return parts
        if parts.float8 and not self.float8:
            return "computes on integers, not on float8"
        return self.why_not_parts(layer, parts)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        parts = match_parts(layer)
        assert isinstance(parts, Parts), parts
        return self.list_signatures(layer, parts)

    @abstractmethod
    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        """Why the kernel does not take the layer; None when it might."""

    @abstractmethod
    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        """The signatures of a static layer that fits."""

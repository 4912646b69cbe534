"""Reshapes that move nothing: the output is the input's bytes, so nothing runs."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, Signature, Stream, Tactic, operand_bytes, tactic


class ViewKernel:
    scratch, packed, rtol, deterministic, implementation = 0, (), 0.0, True, "view"

    def __init__(self, layer: Layer, signature: Signature):
        self.inputs = tuple(0 if t is None else operand_bytes(t, o) for t, o in zip(layer.inputs, signature.inputs, strict=True))
        self.outputs = (operand_bytes(layer.output, signature.outputs[0]),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        """Records nothing: the memory plan has given input and output one place."""


@tactic
class View(Tactic):
    ops = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout")

    def why_not(self, layer: Layer) -> str | None:
        if layer.op not in self.ops:
            return f"computes {', '.join(self.ops)}, not {layer.op}"
        if len(layer.outputs) != 1:
            return "gives a view of one output, not of several"
        return None

    def signatures(self, layer: Layer, machine) -> list[Signature]:
        x = layer.inputs[0]
        rest = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs[1:])
        found = []
        for o in dict.fromkeys((Operand("linear", x.dtype), *self._blocked(layer))):
            found.append(Signature((o, *rest), (o,), ((0, 0),)))
        return found

    def _blocked(self, layer: Layer) -> list[Operand]:
        """Formats in which the bytes stay in order too: those of images, where the shape stays."""
        x = layer.inputs[0]
        if x.type == layer.output.type and x.type.rank == 4:
            return [Operand(f, x.dtype) for f in ("nhwc", "nChw8c", "nChw16c")]
        return []

    def refuses(self, layer: Layer, signature: Signature, machine) -> str | None:
        if layer.inputs[0].is_constant:
            return "the input is constant: there is nothing to view in the arena"
        if layer.inputs[0].dtype != layer.output.dtype:
            return "the types of input and output differ"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, machine) -> ViewKernel:
        return ViewKernel(layer, signature)

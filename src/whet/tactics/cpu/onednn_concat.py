"""Concat by oneDNN."""

from __future__ import annotations

from typing import Any

from whet.network import Layer
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu import _onednn as dnn
from whet.tactics.cpu._kernel import OneDnnTactic, Recipe, activations, describe, image_formats, static, storage_types


@tactic
class OneDnnConcat(OneDnnTactic):
    ops = ("Concat",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        if layer.op == "Fused":
            return "joins alone: what is fused to it stays apart"
        return "one of its inputs is constant" if any(t is None or t.is_constant for t in layer.inputs) else None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer):
            return []
        return [
            Signature((Operand(f, d),) * len(layer.inputs), (Operand(f, d),))
            for d in storage_types(activations(layer), machine)
            for f in image_formats(layer.outputs[0].type.rank)
        ]

    def recipe(self, layer: Layer, signature: Signature, machine: Any) -> Recipe | str:
        out = signature.outputs[0]
        axis = layer.attrs["axis"] % layer.outputs[0].type.rank
        sources = [describe(t, out) for t in layer.inputs if t is not None]
        first = dnn.concat(sources, describe(layer.outputs[0], out), axis)
        places = {f"multi{i}": ("input", i) for i in range(len(sources))} | {"dst": ("output", 0)}
        return Recipe(first, places, rtol=0.0)

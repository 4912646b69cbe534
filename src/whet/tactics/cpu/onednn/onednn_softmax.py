"""Softmax and LogSoftmax by oneDNN."""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_image_formats, list_runtime_tensors, list_storage_types


@tactic
class OneDnnSoftmax(OneDnnTactic):
    ops = ("Softmax", "LogSoftmax")

    def why_not(self, layer: Layer) -> str | None:
        return super().why_not(layer) or ("computes softmax alone: what is fused to it stays apart" if layer.op == "Fused" else None)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        rank = layer.outputs[0].type.rank
        formats = [f for f in list_image_formats(rank) if f in ("nhwc", "linear")]
        return [Signature((Operand(f, d),), (Operand(f, d),)) for d in list_storage_types(list_runtime_tensors(layer), backend) for f in formats]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        shape, stored = static_shape(layer.outputs[0].shape), signature.outputs[0]
        axis = layer.attrs.get("axis", -1) % max(len(shape), 1)
        if stored.format == "linear":  # as three axes: those before, the softmax axis, those after
            shape, axis = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])), 1
            if shape[2] == 1:
                shape = shape[:2]
        layout = dnn.describe(shape, stored.dtype.name, stored.format)
        first = dnn.softmax(layout, layout, axis, log=layer.op == "LogSoftmax")
        return Recipe(first, {"src": ("input", 0), "dst": ("output", 0)})

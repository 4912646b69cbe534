"""Concat by oneDNN."""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_image_formats, list_runtime_tensors, list_storage_types
from whet.tactics.cpu.onednn._post_ops import make_f32_constant


@tactic
class OneDnnConcat(OneDnnTactic):
    ops = ("Concat",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        return "all of its inputs are constant" if all(t is None or t.is_constant for t in layer.inputs) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        out = layer.outputs[0]
        integers = [out.dtype] if out.dtype.name in ("i8", "u8") else []
        return [
            Signature(tuple(None if t is None or t.is_constant else Operand(f, d) for t in layer.inputs), (Operand(f, d),))
            for d in integers or list_storage_types(list_runtime_tensors(layer), backend)
            for f in list_image_formats(out.type.rank)
            if not (integers and f.startswith("nChw"))
        ]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        out = signature.outputs[0]
        axis = layer.attrs["axis"] % layer.outputs[0].type.rank
        sources = [describe(t, out) for t in layer.inputs if t is not None]
        first = dnn.concat(sources, describe(layer.outputs[0], out), axis)
        rounded = out.dtype.name == "bf16" and any(t is not None and t.is_constant for t in layer.inputs)
        recipe = Recipe(first, {"dst": ("output", 0)}, rtol=2**-8 if rounded else 0.0)
        for i, t in enumerate(layer.inputs):
            assert t is not None
            if t.is_constant:
                recipe.constant(f"multi{i}", *make_f32_constant(t), dnn.describe(static_shape(t.shape), "f32"))
            else:
                recipe.places[f"multi{i}"] = ("input", i)
        return recipe

"""PRelu with constant slopes by oneDNN.

For coverage: installations without the extra `jit`, which have no compiled kernels.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_image_formats, list_runtime_tensors, list_storage_types
from whet.tactics.cpu.onednn._post_ops import make_f32_constant


@tactic
class OneDnnPRelu(OneDnnTactic):
    ops = ("PRelu",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        return None if layer.inputs[1] is not None and layer.inputs[1].is_constant else "the slopes are computed at run time"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        types, formats = list_storage_types(list_runtime_tensors(layer), backend), list_image_formats(layer.outputs[0].type.rank)
        return [Signature((Operand(f, d), None), (Operand(f, d),)) for d in types for f in formats]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        slope, layout = layer.needs(1), describe(layer.outputs[0], signature.outputs[0])
        shape = static_shape(slope.shape)
        full = (1,) * (layer.outputs[0].type.rank - len(shape)) + shape
        if sum(d != 1 for d in full) > 1:
            return f"the slopes {list(shape)} differ along several axes"
        first = dnn.prelu(layout, dnn.describe(full, "f32"), layout)
        recipe = Recipe(first, {"src": ("input", 0), "dst": ("output", 0)})
        recipe.constant("weights", *make_f32_constant(slope))
        return recipe

"""LayerNormalization by oneDNN."""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_runtime_tensors, list_storage_types
from whet.tactics.cpu.onednn._post_ops import make_f32_constant


@tactic
class OneDnnLayerNorm(OneDnnTactic):
    ops = ("LayerNormalization",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if len(layer.outputs) != 1:
            return "oneDNN's normalization for inference has no mean and deviation outputs"
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "scale or bias is computed at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        signatures = []
        for dtype in list_storage_types(list_runtime_tensors(layer), backend):
            operand = Operand("linear", dtype)
            signatures.append(Signature((operand, *(None,) * (len(layer.inputs) - 1)), (operand,)))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        shape = static_shape(layer.outputs[0].shape)
        axis = layer.attrs.get("axis", -1) % len(shape)
        rows, width = prod(shape[:axis]), prod(shape[axis:])
        vectors = {n: t for n, t in zip(("scale", "shift"), layer.inputs[1:3], strict=False) if t is not None}
        if any(prod(static_shape(t.shape)) != width for t in vectors.values()):
            return f"scale and bias must have the normalized axes' {width} elements"
        layout = dnn.describe((rows, width), signature.outputs[0].dtype.name)
        epsilon = float(layer.attrs.get("epsilon", 1e-5))
        first = dnn.layer_normalization(layout, layout, epsilon, scale="scale" in vectors, shift="shift" in vectors)
        recipe = Recipe(first, {"src": ("input", 0), "dst": ("output", 0)})
        for name, tensor in vectors.items():
            recipe.constant(name, *make_f32_constant(tensor))
        return recipe

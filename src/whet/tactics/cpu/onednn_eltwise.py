"""Activations and other unary ops by oneDNN, with what follows them fused as post-ops."""

from __future__ import annotations

from typing import Any

from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, anchor, epilogue, outer_input, tactic
from whet.tactics.cpu import _onednn as dnn
from whet.tactics.cpu._epilogue import activation, chain, second_operands
from whet.tactics.cpu._kernel import OneDnnTactic, Recipe, activations, describe, image_formats, static, storage_types


@tactic
class OneDnnEltwise(OneDnnTactic):
    ops = (
        "Relu", "LeakyRelu", "Elu", "Tanh", "Sigmoid", "Silu", "HardSigmoid", "HardSwish", "Clip", "Gelu", "Exp", "Log", "Sqrt", "Abs",
        "Neg", "Softplus", "Mish", "Round", "Pow", "Reciprocal", "Swish", "PRelu",
    )  # fmt: skip

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        head = anchor(layer)
        for t in head.inputs[1:]:
            i = outer_input(layer, t)
            if i is not None and not layer.inputs[i].is_constant:  # type: ignore[union-attr]
                return f"{head.op}'s parameters are computed at run time"
        return "what is fused to it is not a chain" if epilogue(layer) is None else None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        posts = epilogue(layer)
        if posts is None or self.why_not(layer) or not static(layer):
            return []
        x = outer_input(layer, anchor(layer).inputs[0])
        found = []
        for dtype in storage_types(activations(layer), machine):
            for f in image_formats(layer.outputs[0].type.rank):
                out = Operand(f, dtype)
                others = second_operands(posts, layer, out)
                found.append(Signature(tuple(out if i == x else others.get(i) for i in range(len(layer.inputs))), (out,)))
        return found

    def recipe(self, layer: Layer, signature: Signature, machine: Any) -> Recipe | str:
        posts, head = epilogue(layer), anchor(layer)
        assert posts is not None
        x = outer_input(layer, head.inputs[0])
        assert x is not None
        places = {i: outer_input(layer, t) for i, t in enumerate(head.inputs) if i and t is not None}
        bounds = {f"input{i}": layer.inputs[p].array() for i, p in places.items() if p is not None}  # type: ignore[union-attr]
        if head.op == "PRelu":
            if bounds["input1"].size != 1:
                return "one slope for all; slopes a channel are a PRelu of their own"
            unary: dnn.Eltwise | None = dnn.Eltwise("relu", float(bounds["input1"].reshape(-1)[0]))
        else:
            unary = activation(head.op, {**head.attrs, **bounds})
        if head.op == "Pow" and layer.outputs[0].shape != layer.inputs[x].shape:  # type: ignore[union-attr]
            return "the exponent broadcasts the base"
        fused = chain(posts, layer, signature)
        if unary is None or isinstance(fused, str):
            return fused if isinstance(fused, str) else f"oneDNN has no eltwise for {head.op}"
        shape = static_shape(layer.outputs[0].shape)
        out = signature.outputs[0]
        if len(shape) > 5 and not posts:
            layout = dnn.describe((_elements(shape),), out.dtype.name)
        else:
            layout = describe(layer.outputs[0], out)
        first = dnn.eltwise(unary.alg, layout, layout, unary.alpha, unary.beta, fused.attributes)
        recipe = Recipe(first, {"src": ("input", x), "dst": ("output", 0)})
        fused.fill(recipe)
        return recipe


def _elements(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n

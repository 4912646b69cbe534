"""Activations and other unary ops by oneDNN, with the epilogue as post-ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, outer_input, require_epilogue_steps
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_image_formats, list_runtime_tensors, list_storage_types
from whet.tactics.cpu.onednn._nonfinite import Reference, list_declared_references
from whet.tactics.cpu.onednn._post_ops import Chain, clip_bounds, find_activation, match_post_ops, select_second_operands


@tactic
class OneDnnEltwise(OneDnnTactic):
    version = 2
    ops = (
        "Relu", "LeakyRelu", "Elu", "Tanh", "Sigmoid", "Silu", "HardSigmoid", "HardSwish", "Clip", "Gelu", "Exp", "Sqrt", "Abs", "Neg",
        "Softplus", "Mish", "Round", "Pow", "Reciprocal", "Swish", "PRelu",
    )  # fmt: skip

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        for t in head.inputs[1:]:
            i = outer_input(layer, t)
            if i is not None and not layer.needs(i).is_constant:
                return f"{head.op}'s parameters are computed at run time"
        return "its fused operations do not form a chain" if find_epilogue_steps(layer) is None else None

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """If NaN is restored, the root operation propagates it."""
        head, references = get_root_layer(layer), list_declared_references(layer, implementation)
        again = head.op in {p.op for p in find_epilogue_steps(layer) or ()}
        if not again and _find_restoring_operation(head.op, {**head.attrs, **_get_parameters(layer, head)}):
            return [{op: f for op, f in table.items() if op != head.op} for table in references]
        return references

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        steps = find_epilogue_steps(layer)
        if steps is None or self.why_not(layer) or not is_static(layer):
            return []
        x = get_source_index(layer)
        signatures = []
        for dtype in list_storage_types(list_runtime_tensors(layer), backend):
            for f in list_image_formats(layer.outputs[0].type.rank):
                out = Operand(f, dtype)
                others = select_second_operands(steps, layer, out)
                signatures.append(Signature(tuple(out if i == x else others.get(i) for i in range(len(layer.inputs))), (out,)))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        steps, head = require_epilogue_steps(layer), get_root_layer(layer)
        x = get_source_index(layer)
        bounds = _get_parameters(layer, head)
        if head.op == "PRelu":
            if bounds["input1"].size != 1:
                return "takes one slope; a PRelu with slopes per channel is another tactic's"
            unary = find_activation("LeakyRelu", {"alpha": float(bounds["input1"].reshape(-1)[0])})
        else:
            unary = find_activation(head.op, {**head.attrs, **bounds})
        if head.op == "Pow" and layer.outputs[0].shape != layer.needs(x).shape:
            return "the exponent broadcasts the base"
        fused = match_post_ops(steps, layer, signature)
        restore = _find_restoring_operation(head.op, {**head.attrs, **bounds})
        if head.op == "Exp":
            unary = dnn.Eltwise("exp")
        if unary is None or isinstance(fused, str):
            return fused if isinstance(fused, str) else f"oneDNN has no eltwise for {head.op}"
        shape = static_shape(layer.outputs[0].shape)
        out = signature.outputs[0]
        if len(shape) > 5 and not steps:
            layout = dnn.describe((_count_elements(shape),), out.dtype.name)
        else:
            layout = describe(layer.outputs[0], out)
        if not steps and not restore:
            return Recipe(dnn.eltwise(unary.alg, layout, layout, unary.alpha, unary.beta), {"src": ("input", x), "dst": ("output", 0)})
        return _make_binary(unary, restore, layout, x, fused)


def _get_parameters(layer: Layer, head: Layer) -> dict[str, np.ndarray]:
    """The root operation's constant operands as `input1`, `input2`."""
    places = {i: outer_input(layer, t) for i, t in enumerate(head.inputs) if i and t is not None}
    return {f"input{i}": layer.needs(p).array() for i, p in places.items() if p is not None}


def _find_restoring_operation(op: str, attrs: Mapping[str, Any]) -> str | None:
    """The operation with the input that restores NaN and keeps all other results: max(exp(x), x) is exp(x).

    x86's max and min give the second operand, here the input, when either is NaN. A Clip with two bounds has no such operation.
    """
    if op in ("Relu", "Exp"):
        return "max"
    if op == "Clip":
        low, high = clip_bounds(attrs)
        return "max" if high == math.inf else "min" if low == -math.inf else None
    return None


def _make_binary(unary: dnn.Eltwise, restore: str | None, layout: dnn.MemoryDesc, x: int, fused: Chain) -> Recipe:
    """max(x, x), the activation and its epilogue as post-ops: oneDNN's eltwise takes post-ops in scalar loops only."""
    chain, places = Chain([unary]), {"src": ("input", x), "src1": ("input", x), "dst": ("output", 0)}
    if restore:
        chain.post_ops.append(dnn.Binary(restore, layout))
        chain.places["post1"] = ("input", x)
    chain.extend(fused)
    recipe = Recipe(dnn.binary("max", layout, layout, layout, chain.attributes), places)
    chain.fill(recipe)
    return recipe


def _count_elements(shape: tuple[int, ...]) -> int:
    n = 1
    for d in shape:
        n *= d
    return n

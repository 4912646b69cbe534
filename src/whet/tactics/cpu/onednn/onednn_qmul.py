"""Quantized Mul by oneDNN: an integer tensor times a float factor that broadcasts (a gate), integer result, in one pass.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.errors import BuildError
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static
from whet.tactics.cpu.onednn._post_ops import Chain, match_post_ops
from whet.tactics.cpu.onednn._quantized import Parts, QuantizedTactic, drop_implied_bounds, list_same_format_signatures, require_quantized

_COST_OF_PLAIN_LOOPS = 100  # multiply-adds in the time of one element (50 ns) of the scalar loops, which batches of several samples use


@tactic
class OneDnnQMul(QuantizedTactic, OneDnnTactic):
    ops = ("Mul",)

    def why_not_parts(self, parts: Parts) -> str | None:
        places = find_integer_and_factor(parts)
        if parts.stores is None or places is None:
            return "multiplies an integer tensor by a float factor and stores integers"
        x, factor = (parts.view.needs(i) for i in places)
        if x.is_constant or factor.is_constant or x.shape != parts.view.outputs[0].shape or x.type.rank != factor.type.rank:
            return "takes an integer tensor of the output's shape and a factor of its rank, both computed at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        parts = require_quantized(layer)
        x, factor = require_integer_and_factor(parts)
        return list_same_format_signatures(layer, {x: parts.reads[x].dtype, factor: F32}, parts.result.dtype)

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        parts = require_quantized(layer)
        x, factor = require_integer_and_factor(parts)
        fused = match_post_ops(drop_implied_bounds(parts), parts.view, signature)
        if isinstance(fused, str):
            return fused
        whole, gate = (describe(parts.view.needs(i), signature.needs(i)) for i in (x, factor))
        if any(a not in (1, b) for a, b in zip(static_shape(parts.view.needs(factor).shape), static_shape(layer.outputs[0].shape), strict=True)):
            return "the factor broadcasts the integer"
        reads, steps, names = parts.reads[x], Chain(), {"src": x, "src1": factor}
        if reads.zero:  # (q - zero) * scale first: max(q, q) is q, and the factor is a post-op
            steps = Chain([dnn.Eltwise("linear", 1.0, -reads.zero * reads.number), dnn.Binary("mul", gate)], {"post1": ("input", factor)})
            names["src1"] = x
        steps.extend(fused)
        steps.post_ops.append(dnn.Eltwise("linear", 1.0 / parts.result.number, float(parts.result.zero)))
        scaled = ("src", "src1") if reads.zero else ("src",)
        attributes = dnn.Attributes(tuple(steps.post_ops), scales=tuple((name, 0, 1) for name in scaled))
        target = describe(parts.view.outputs[0], signature.outputs[0])
        first = dnn.binary("max" if reads.zero else "mul", whole, whole if reads.zero else gate, target, attributes)
        work = _COST_OF_PLAIN_LOOPS * prod(static_shape(layer.outputs[0].shape))
        recipe = Recipe(first, {name: ("input", i) for name, i in names.items()} | {"dst": ("output", 0)}, 0.0, work)
        for name in scaled:
            recipe.constant(f"scale:{name}", f"scale|{reads.scale.tobytes().hex()}", lambda: reads.scale)
        steps.fill(recipe)
        return recipe


def find_integer_and_factor(parts: Parts) -> tuple[int, int] | None:
    """Indices of the integer input and of the factor; None if there is not one of each."""
    a, b = (parts.place(t) for t in parts.head.inputs)
    if a is None or b is None or (a in parts.reads) == (b in parts.reads):
        return None
    return (a, b) if a in parts.reads else (b, a)


def require_integer_and_factor(parts: Parts) -> tuple[int, int]:
    """`find_integer_and_factor` for a layer that a tactic takes. Raises BuildError if there is not one of each."""
    places = find_integer_and_factor(parts)
    if places is None:
        raise BuildError(f"{parts.view.name} has not one integer and one factor")
    return places

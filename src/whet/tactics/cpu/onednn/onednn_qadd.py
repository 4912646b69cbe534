"""Quantized Add by oneDNN: two integers of different scales, epilogue in floats, integer result.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from whet.backends import Backend
from whet.network import Layer
from whet.tactics._base import Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static
from whet.tactics.cpu.onednn._post_ops import Chain, match_post_ops
from whet.tactics.cpu.onednn._quantized import Parts, QuantizedTactic, drop_implied_bounds, list_same_format_signatures, require_quantized


@tactic
class OneDnnQAdd(QuantizedTactic, OneDnnTactic):
    ops = ("Add",)
    version = 2

    def why_not_parts(self, parts: Parts) -> str | None:
        if parts.stores is None or any(parts.place(t) not in parts.reads for t in parts.head.inputs):
            return "adds integers and stores integers"
        if any(parts.view.needs(i).is_constant for i in parts.reads):
            return "one of its operands is constant"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        parts = require_quantized(layer)
        return list_same_format_signatures(layer, {i: s.dtype for i, s in parts.reads.items()}, parts.result.dtype)

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        parts = require_quantized(layer)
        places = [i for i in (parts.place(t) for t in parts.head.inputs) if i is not None]
        shift = -sum(parts.reads[i].zero * parts.reads[i].number for i in places)
        steps = Chain([dnn.Eltwise("linear", 1.0, shift)] if shift else [])
        fused = match_post_ops(drop_implied_bounds(parts), parts.view, signature)
        if isinstance(fused, str):
            return fused
        steps.extend(fused)
        steps.post_ops.append(dnn.Eltwise("linear", 1.0 / parts.result.number, float(parts.result.zero)))
        sides = [describe(parts.view.needs(i), signature.needs(i)) for i in places]
        attributes = dnn.Attributes(tuple(steps.post_ops), scales=(("src", 0, 1), ("src1", 0, 1)))
        first = dnn.binary("add", sides[0], sides[1], describe(parts.view.outputs[0], signature.outputs[0]), attributes)
        recipe = Recipe(first, {"dst": ("output", 0)}, 0.0)
        for name, i in zip(("src", "src1"), places, strict=True):
            recipe.places[name] = ("input", i)
            scale = parts.reads[i].scale
            recipe.constant(f"scale:{name}", f"scale|{scale.tobytes().hex()}", partial(np.asarray, scale))
        steps.fill(recipe)
        return recipe

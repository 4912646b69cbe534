"""Quantized Conv by oneDNN: u8 or i8 input, i8 weights with scales per channel, bias, residual and activation in floats, u8, i8 or float result.

For coverage: installations without the extra `jit`, which have no compiled kernels.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, format_fits, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Recipe, describe, is_static, to_f32
from whet.tactics.cpu.onednn._quantized import (
    OneDnnQuantized,
    Parts,
    add_scales,
    list_signatures,
    make_quantized_attributes,
    make_weight_key,
    match_real_post_ops,
    require_quantized,
    why_inexact,
    why_inexact_operand,
)
from whet.tactics.cpu.onednn.onednn_conv import get_conv_geometry, get_grouped_shape


@tactic
class OneDnnQConv(OneDnnQuantized):
    ops = ("Conv",)
    version = 2

    def unavailable(self) -> str | None:
        return why_inexact()

    def why_not_parts(self, parts: Parts) -> str | None:
        x, w, b = parts.operand_indices()
        if x not in parts.reads or w not in parts.reads:
            return "its input or its weights are not quantized"
        weights = parts.view.needs(w)
        if not weights.is_constant or (b is not None and not parts.view.needs(b).is_constant):
            return "the weights are computed at run time"
        if parts.reads[w].zero or parts.reads[w].dtype.name != "i8":
            return "oneDNN takes symmetric i8 weights"
        return why_inexact_operand(parts.reads[x])

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        parts = require_quantized(layer)
        return list_signatures(parts, "nhwc", backend)

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        parts = require_quantized(layer)
        head, view = parts.head, parts.view
        x, w, b = parts.operand_indices()
        source, weights, stored = view.needs(x), view.needs(w), signature.needs(x)
        group, count = head.attrs["group"], int(weights.shape[0])
        channels = (1 if group == 1 else 3, count)
        fused = match_real_post_ops(parts, signature)
        if isinstance(fused, str):
            return fused
        shape = get_grouped_shape(static_shape(weights.shape), group, False)
        strides, dilations, pads = get_conv_geometry(head, static_shape(source.shape), static_shape(view.outputs[0].shape), shape)
        first = dnn.convolution(
            describe(source, stored),
            dnn.describe(shape, "i8", "any"),
            None if b is None else dnn.describe((count,), "f32"),
            describe(view.outputs[0], signature.outputs[0]),
            strides,
            dilations,
            pads,
            make_quantized_attributes(fused.post_ops, parts, x, w, channels),
        )
        work = prod(static_shape(view.outputs[0].shape)) * prod(static_shape(weights.shape)[1:])
        recipe = Recipe(first, {"src": ("input", x), "dst": ("output", 0)}, 0.0 if parts.stores else None, work)
        recipe.few_channels = any(d % 16 for d in (source.shape[1], view.outputs[0].shape[1]))
        fused.fill(recipe)
        add_scales(recipe, parts, x, w)
        key = f"{make_weight_key(parts, x, w)}|Conv {group}"
        recipe.constant("weights", key, lambda: np.reshape(weights.array(), shape), dnn.describe(shape, "i8"))
        if b is not None:
            bias = view.needs(b)
            recipe.constant("bias", f"{bias.constant().digest}|f32", lambda: to_f32(bias).reshape(-1))
        return recipe

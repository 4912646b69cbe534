"""Quantized average pooling by oneDNN: windows and global pooling, rescaled before rounding.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, format_fits, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static
from whet.tactics.cpu.onednn._quantized import Parts, QuantizedTactic, require_quantized
from whet.tactics.cpu.onednn.onednn_pool import fit_window


@tactic
class OneDnnQPool(QuantizedTactic, OneDnnTactic):
    ops = ("AveragePool", "GlobalAveragePool")

    def why_not_parts(self, parts: Parts) -> str | None:
        x = parts.source_index()
        if x not in parts.reads or parts.stores is None or parts.steps:
            return "pools integers and stores integers"
        if parts.reads[x].dtype != parts.stores.dtype:
            return f"oneDNN's pooling keeps the type; this layer reads {parts.reads[x].dtype} and stores {parts.stores.dtype}"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.needs(0).type.rank):
            return []
        parts = require_quantized(layer)
        x = parts.source_index()
        own = Operand("nhwc", parts.result.dtype)
        inputs = tuple(own if i == x else None for i in range(len(layer.inputs)))
        # With one value per channel the bytes are the same row-major.
        whole = [Operand("linear", own.dtype)] if parts.head.op == "GlobalAveragePool" else []
        return [Signature(inputs, (o,)) for o in (own, *whole)]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        parts = require_quantized(layer)
        x, head = parts.source_index(), parts.head
        source, target = static_shape(parts.view.needs(x).shape), static_shape(parts.view.outputs[0].shape)
        reads, stores, dtype = parts.reads[x], parts.result, parts.result.dtype.name
        alg, r = "avg_exclude_padding", len(source) - 2
        if head.op == "GlobalAveragePool":
            kernel, strides, dilations, pads = source[2:], (1,) * r, (1,) * r, ((0,) * r, (0,) * r)
        else:
            kernel, strides, dilations, pads, grown = fit_window(head, source[2:], target[2:])
            if head.attrs.get("count_include_pad"):
                alg = "avg_include_padding"
                if grown or (reads.zero and any(map(any, pads))):
                    return "its padding is not the integer 0, or is not counted"
        factor = reads.number / stores.number
        steps = () if factor == 1.0 and reads.zero == stores.zero else (dnn.Eltwise("linear", factor, stores.zero - reads.zero * factor),)
        first = dnn.pooling(
            alg,
            dnn.describe(source, dtype, "nhwc"),
            dnn.describe(target, dtype, "nhwc"),
            kernel,
            strides,
            dilations,
            pads,
            dnn.Attributes(steps),
        )
        return Recipe(first, {"src": ("input", x), "dst": ("output", 0)}, 0.0)

"""QuantizeLinear and DequantizeLinear by oneDNN's reorder, into another format on the way; one scale, or one an entry of an axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import BF16, F32, Layer, format_fits, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu import _onednn as dnn
from whet.tactics.cpu._kernel import OneDnnTactic, Recipe, describe, static

_STORED = ("i8", "u8")


@tactic
class OneDnnQuantize(OneDnnTactic):
    ops = ("QuantizeLinear", "DequantizeLinear")

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        integer = layer.outputs[0] if layer.op == "QuantizeLinear" else layer.inputs[0]
        real = layer.inputs[0] if layer.op == "QuantizeLinear" else layer.outputs[0]
        assert integer is not None
        assert real is not None
        if layer.op == "Fused" or layer.inputs[0].is_constant:  # type: ignore[union-attr]
            return "its input is constant, or it is fused to something"
        if integer.dtype.name not in _STORED or real.dtype != F32:
            return f"converts between f32 and {', '.join(_STORED)}, not {real.dtype} and {integer.dtype}"
        if layer.attrs["block_size"]:
            return "has a scale for each block"
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "its scale is computed at run time"
        zeros = layer.input(2)
        if zeros is not None and np.any(zeros.array() != zeros.array().reshape(-1)[:1]):
            return "zero points differ within the tensor"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer):
            return []
        rank = layer.outputs[0].type.rank
        reals = [F32, BF16] if "avx512_bf16" in machine.features and dnn.has_isa("avx512_core_bf16") else [F32]
        formats = [f for f in ("nhwc", "linear") if format_fits(f, rank)]
        found = []
        for real in reals:
            for f in formats:
                for g in formats:
                    source, target = (real, layer.outputs[0].dtype) if layer.op == "QuantizeLinear" else (layer.inputs[0].dtype, real)  # type: ignore[union-attr]
                    found.append(Signature((Operand(f, source), *(None,) * (len(layer.inputs) - 1)), (Operand(g, target),)))
        return found

    def recipe(self, layer: Layer, signature: Signature, machine: Any) -> Recipe | str:
        x, scale, zero = layer.inputs[0], layer.inputs[1], layer.input(2)
        stored = signature.inputs[0]
        assert x is not None
        assert scale is not None
        assert stored is not None
        side = "dst" if layer.op == "QuantizeLinear" else "src"
        values = np.asarray(scale.array(), np.float32).reshape(-1)
        shape = static_shape(x.shape)
        mask = 0 if values.size == 1 else 1 << (layer.attrs["axis"] % len(shape))
        shift = 0 if zero is None or not zero.array().size else int(zero.array().reshape(-1)[0])
        made = dnn.Attributes(scales=((side, mask, values.size),), zero_points=((side, 0, 1),) if shift else ())
        first = dnn.reorder(describe(x, stored), describe(layer.outputs[0], signature.outputs[0]), made)
        recipe = Recipe(first, {"src": ("input", 0), "dst": ("output", 0)}, 0.0 if side == "dst" else None)
        recipe.constant(f"scale:{side}", f"scale|{values.tobytes().hex()}", lambda: values)
        if shift:
            recipe.constant(f"zero:{side}", f"zero|{shift}", lambda: np.array([shift], np.int32))
        return recipe

"""Pad with a constant along one axis by oneDNN's concat with constant ends (the channel padding of CIFAR ResNets' shortcuts)."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.ops.pad import pad_amounts
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, describe, is_static, list_image_formats, list_storage_types

_MOVABLE = ("i8", "u8")


@tactic
class OneDnnPad(OneDnnTactic):
    ops = ("Pad",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if layer.attrs["mode"] != "constant":
            return f"pads with a constant, not in mode {layer.attrs['mode']}"
        x, value = layer.inputs[0], layer.input(2)
        if x is None or x.is_constant or (value is not None and not value.is_constant):
            return "the data are constant, or the value is computed at run time"
        grown = [pads for pads in pad_amounts(layer) if pads != (0, 0)]
        if len(grown) != 1 or not all(isinstance(p, int) and p >= 0 for p in grown[0]):
            return f"pads one axis, not {grown}"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        x, y = layer.inputs[0], layer.outputs[0]
        if self.why_not(layer) or not is_static(layer):
            return []
        absent = (None,) * (len(layer.inputs) - 1)
        return [
            Signature((Operand(f, d), *absent), (Operand(f, d),))
            for d in list_storage_types([x, y], backend) or ([y.dtype] if y.dtype.name in _MOVABLE else [])
            for f in list_image_formats(y.type.rank)
        ]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        x, y, stored = layer.needs(0), layer.outputs[0], signature.outputs[0]
        pads, shape = pad_amounts(layer), static_shape(x.shape)
        axis = next(i for i, p in enumerate(pads) if p != (0, 0))
        value = 0.0 if layer.input(2) is None else float(layer.needs(2).array().reshape(-1)[0])
        ends = {i: int(p) for i, p in zip((0, 2), pads[axis], strict=True) if p}
        parts = {1: describe(x, stored)}
        parts |= {i: dnn.describe((*shape[:axis], n, *shape[axis + 1 :]), stored.dtype.name, stored.format) for i, n in ends.items()}
        order = sorted(parts)
        first = dnn.concat([parts[i] for i in order], describe(y, stored), axis)
        exact = float(np.asarray(value).astype(stored.dtype.numpy)) == value
        recipe = Recipe(first, {f"multi{order.index(1)}": ("input", 0), "dst": ("output", 0)}, rtol=0.0 if exact else None)
        for i in ends:
            filled = parts[i].dims
            plain = dnn.describe(filled, "f32")
            recipe.constant(f"multi{order.index(i)}", f"filled {value!r}", _make_filler(filled, value), plain)
        return recipe


def _make_filler(shape: tuple[int, ...], value: float) -> Any:
    return lambda: np.full(shape, value, np.float32)

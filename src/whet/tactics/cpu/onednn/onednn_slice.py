"""Slice, and Gather of one entry, by oneDNN's reorder from a strided part of the input."""

from __future__ import annotations

from typing import Any

from whet.backends import Backend
from whet.network import Layer, compute_strides, static_shape
from whet.ops.slice import slice_ranges
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import OneDnnTactic, Recipe, is_static, list_image_formats, list_storage_types

_MOVABLE = ("i32", "i8", "u8")


@tactic
class OneDnnSlice(OneDnnTactic):
    ops = ("Slice", "Gather")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        x = layer.inputs[0]
        if x is None or x.is_constant:
            return "the data are constant"
        if any(t is not None and t.shape_value is None for t in layer.inputs[1:]):
            return "the range is computed at run time"
        if layer.op == "Gather" and (layer.inputs[1] is None or layer.inputs[1].type.elements != 1):
            return "takes one index, not several"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        x, y = layer.needs(0), layer.outputs[0]
        if self.why_not(layer) or not is_static(layer):
            return []
        types = list_storage_types([x], backend) or ([x.dtype] if x.dtype.name in _MOVABLE else [])
        formats = [f for f in list_image_formats(y.type.rank) if not f.startswith("nChw") and (layer.op == "Slice" or f == "linear")]
        absent = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand(f, d), *absent), (Operand(f, d),)) for d in types for f in formats]

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        x, y, stored = layer.needs(0), layer.outputs[0], signature.outputs[0]
        own = static_shape(x.shape)
        steps = list(compute_strides(stored.format, own))
        shape, start = list(own), 0
        for axis, (first, length, step) in _list_cuts(layer, own).items():
            if step < 0 or not isinstance(first, int) or not isinstance(length, int):
                return "has a negative step, which no positive stride describes"
            start += first * steps[axis]
            shape[axis], steps[axis] = length, steps[axis] * step
        target = static_shape(y.shape)
        if layer.op == "Slice":
            goal = dnn.describe(shape, stored.dtype.name, stored.format)
        else:
            goal = dnn.describe(shape, stored.dtype.name)  # the axis of the index is dropped, or has length 1: the same bytes
            assert [d for d in target if d != 1] == [d for d in shape if d != 1]
        recipe = Recipe(
            dnn.reorder(dnn.describe(shape, stored.dtype.name, strides=steps), goal), {"src": ("input", 0), "dst": ("output", 0)}, 0.0
        )
        recipe.offsets["src"] = start * stored.dtype.bits // 8
        return recipe


def _list_cuts(layer: Layer, shape: tuple[int, ...]) -> dict[int, tuple[Any, Any, int]]:
    """{axis: (first, length, step)}."""
    if layer.op == "Slice":
        return slice_ranges(layer)
    axis = layer.attrs["axis"] % len(shape)
    chosen = layer.needs(1)
    assert chosen.shape_value is not None  # `why_not` said so
    index = static_shape(chosen.shape_value)[0]
    return {axis: (index % shape[axis], 1, 1)}

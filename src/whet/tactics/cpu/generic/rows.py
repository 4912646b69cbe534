"""Concat and Split of element types that oneDNN does not move, such as i64 and bool. For coverage: otherwise NumPy computes them."""

from __future__ import annotations

from whet.network import Layer, Tensor, compute_stored_shape, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu.generic._copy_rows_ir import emit_copy_rows_ir
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, get_moved_type, split_axes

_ONEDNN = ("f32", "bf16", "i8", "u8")


@tactic
class Rows(LoopTactic):
    ops = ("Concat", "Split")
    leaves_to_onednn = True  # the types that oneDNN moves

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return tuple(range(len(layer.inputs))) if layer.op == "Concat" else (0,)

    def refuses_types(self, layer: Layer) -> str | None:
        x = layer.needs(0)
        if self.leaves_to_onednn and (x.dtype.name in _ONEDNN or (layer.op == "Split" and x.dtype.name == "i32")):
            return f"oneDNN moves {x.dtype}"
        return "moves elements of whole bytes" if get_moved_type(x.dtype) is None else None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        joins, axis = layer.op == "Concat", layer.attrs["axis"]
        parts: list[Tensor] = [layer.needs(i) for i in range(len(layer.inputs))] if joins else list(layer.outputs)
        whole = layer.outputs[0] if joins else layer.needs(0)
        element = get_moved_type(whole.dtype)
        assert element is not None
        if form != "linear" and any(t.is_constant for t in parts):
            return "a part is constant"
        if form == "nhwc":
            rank = whole.type.rank
            axis = (0, rank - 1, *range(1, rank - 1))[axis % rank]
        outer, length, inner = split_axes(static_shape(compute_stored_shape(form, whole.shape)), axis)
        launches, at = [], 0
        for k, t in enumerate(parts):
            width = split_axes(static_shape(compute_stored_shape(form, t.shape)), axis)[1] * inner
            part, rest = (0, width), (at, length * inner)
            places = (("input", k), ("output", 0)) if joins else (("input", 0), ("output", k))
            numbers = (width, *part, *rest) if joins else (width, *rest, *part)
            launches.append(Launch("copy_rows", emit_copy_rows_ir(element), places, outer, numbers, work=outer * width))
            at += width
        return Loops(tuple(launches))

"""ScatterND and ScatterElements. For coverage: otherwise NumPy computes them."""

from __future__ import annotations

from math import prod

from whet.network import Layer, static_shape
from whet.network.formats import compute_strides
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import INT32, INT64
from whet.tactics.cpu.generic._copy_rows_ir import emit_copy_rows_ir
from whet.tactics.cpu.generic._loops import NUMBERS, Launch, Loops, LoopTactic, get_moved_type
from whet.tactics.cpu.generic._scatter_ir import emit_scatter_lines_ir, emit_scatter_rows_ir

_INDICES = {"i32": INT32, "i64": INT64}
_STEP = 64  # columns of a row that threads share
_PLACES = (("input", 1), ("input", 2), ("output", 0), ("fault", 0))


@tactic
class Scatter(LoopTactic):
    ops = ("ScatterElements", "ScatterND")
    inplace = ((0, 0),)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return (0, 1, 2)

    def refuses_types(self, layer: Layer) -> str | None:
        x, at = layer.needs(0), layer.needs(1)
        if at.dtype.name not in _INDICES:
            return "takes indices of 4 or 8 bytes"
        if layer.attrs["reduction"] != "none" and x.dtype.name not in NUMBERS:
            return f"combines {', '.join(NUMBERS)}"
        return "moves elements of whole bytes" if get_moved_type(x.dtype) is None else None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, shape = layer.needs(0), static_shape(layer.needs(0).shape)
        launches = [_describe_updates(layer)]
        if not inplace:
            moved = get_moved_type(x.dtype)
            assert moved is not None
            rows, width = shape[0] if shape else 1, prod(shape[1:])
            numbers = (width, 0, width, 0, width)
            launches.insert(0, Launch("copy_rows", emit_copy_rows_ir(moved), (("input", 0), ("output", 0)), rows, numbers, work=rows * width))
        failure = (
            f"{layer.op} '{layer.name}': an index is outside of %{x.name}: {x.type}. Check the values of %{layer.needs(1).name}."
        )
        return Loops(tuple(launches), failure=failure, rtol=0.0 if layer.attrs["reduction"] == "none" else 1e-6)


def _describe_updates(layer: Layer) -> Launch:
    x, at, reduction = layer.needs(0), layer.needs(1), layer.attrs["reduction"]
    shape, places = static_shape(x.shape), static_shape(at.shape)
    element = get_moved_type(x.dtype) if reduction == "none" else NUMBERS[x.dtype.name]
    assert element is not None
    if layer.op == "ScatterND":
        axes = places[-1]
        rows, width = prod(places[:-1]), prod(shape[axes:])
        steps = (prod(shape[k + 1 : axes]) for k in range(axes))
        ir = emit_scatter_rows_ir(element, _INDICES[at.dtype.name], axes, reduction)
        return Launch("scatter_rows", ir, _PLACES, width, (rows, *shape[:axes], *steps), _STEP, rows * width)
    axis = layer.attrs["axis"] % len(shape)
    strides, own = compute_strides("linear", shape), compute_strides("linear", places)
    others = [k for k in range(len(shape)) if k != axis and places[k] > 1]
    ir = emit_scatter_lines_ir(element, _INDICES[at.dtype.name], len(others), reduction)
    numbers = (places[axis], own[axis], shape[axis], strides[axis], *(t[k] for t in (places, own, strides) for k in others))
    return Launch("scatter_lines", ir, _PLACES, prod(places[k] for k in others), numbers, work=4 * prod(places))

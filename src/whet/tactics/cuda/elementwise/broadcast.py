"""Elementwise layers with operands that broadcast along any axes, of floats, integers and bools, comparisons, Where and casts.

Row-major, a value per thread. Layers of integers and bools alone compute in 64-bit integers, all others in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.kernel import TYPE, GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda._device.plain_layer import UnfusedTactic
from whet.tactics.cuda.elementwise.elementwise import match_chain

_TEXT = {
    "Add": "a + b", "Sub": "a - b", "Mul": "a * b", "Div": "a / b", "Pow": "powf(a, b)", "Max": "max_nan(a, b)", "Min": "min_nan(a, b)",
    "Where": "a != 0 ? b : c", "Cast": "a", "Equal": "a == b", "Less": "a < b", "LessOrEqual": "a <= b", "Greater": "a > b",
    "GreaterOrEqual": "a >= b", "And": "a && b", "Or": "a || b", "Xor": "(a != 0) != (b != 0)", "Not": "!a", "IsNaN": "a != a", "Neg": "-a",
    "Abs": "a < 0 ? -a : a",
}  # fmt: skip
#: in integers; Div and Pow of integers have no kernel
_INTEGER_TEXT = {k: v for k, v in _TEXT.items() if k not in ("Div", "Pow", "IsNaN")} | {"Max": "a > b ? a : b", "Min": "a < b ? a : b"}
_TO_BOOL = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN"})
_OPERANDS = {"Where": 3, "Cast": 1, "Not": 1, "IsNaN": 1, "Neg": 1, "Abs": 1}
_KINDS = {**TYPE, "i64": 3, "i32": 4, "u8": 5, "bool": 7, "i8": 6}
_RANK = 5


@dataclass(frozen=True)
class BroadcastArguments(Arguments, kernel="broadcast.cu"):
    a: ConstPointer
    b: ConstPointer
    c: ConstPointer
    out: Pointer
    size: Annotated[Sequence[int], make_array_type("u32", 5)]
    count: UInt32
    a_stride: Annotated[Sequence[int], make_array_type("int", 5)]  # elements; 0 along broadcast axes
    b_stride: Annotated[Sequence[int], make_array_type("int", 5)]
    c_stride: Annotated[Sequence[int], make_array_type("int", 5)]


@tactic
class Broadcast(UnfusedTactic):
    """Layers that `elementwise` does not take: operands that broadcast along axes other than all but the channels'."""

    ops = tuple(_TEXT)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        operands, out = layer.required_inputs(), layer.outputs[0].dtype
        wanted = _OPERANDS.get(layer.op, 2)
        if len(layer.inputs) != wanted or any(t.dtype.name not in _KINDS for t in (*operands, layer.outputs[0])):
            return f"takes {wanted} operands of floats, bools or integers up to 64 bits"
        if layer.op == "Cast":
            return "casts from or to integers and bools" if out.is_float and operands[0].dtype.is_float else None
        values = operands[1:] if layer.op == "Where" else operands
        if any(t.dtype != (values[0].dtype if layer.op in _TO_BOOL else out) for t in values):
            return "takes operands of one type"
        if not values[0].dtype.is_float and layer.op not in _INTEGER_TEXT:
            return f"computes no {layer.op} of integers"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        out = layer.outputs[0].dtype
        floats = {t.dtype for t in (*layer.required_inputs(), layer.outputs[0]) if t.dtype.is_float}
        # a comparison of rounded operands may differ, so that only float results permit narrower types
        kinds = (F16, BF16, F32) if floats == {F32} and out == F32 else (next(iter(floats), out),)
        signatures = []
        for kind in kinds:
            ins = tuple(Operand("linear", kind if t.dtype.is_float else t.dtype) for t in layer.required_inputs())
            signatures.append(Signature(ins, (Operand("linear", kind if out.is_float else out),)))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if prod(static_shape(layer.outputs[0].shape)) >= 2**31:
            return "more than 2**31 elements"
        if layer.outputs[0].dtype.is_float and layer.op not in ("Where", "Cast") and not isinstance(match_chain(layer), str):
            return "`elementwise` takes this"
        return f"takes at most {_RANK} axes after merging" if len(_merge_axes(layer)[0]) > _RANK else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        reason = self.refuses(layer, signature, backend)
        if reason:
            raise PlanRefused(reason)
        sizes, strides = _merge_axes(layer)
        fill, count = _RANK - len(sizes), prod(sizes)
        kinds = [_KINDS[o.dtype.name] for o in signature.inputs if o is not None]
        kinds += [0] * (3 - len(kinds))
        operands = (*layer.required_inputs(), layer.outputs[0])
        integers = not any(t.dtype.is_float for t in operands)
        constants = dict(zip(("A_KIND", "B_KIND", "C_KIND"), kinds, strict=True)) | {
            "TO": _KINDS[signature.outputs[0].dtype.name],
            "INTEGERS": int(integers),
            "EXPRESSION": (_INTEGER_TEXT if integers else _TEXT)[layer.op],
        }
        steps = [(*(0,) * fill, *row) for row in strides]
        steps += [(0,) * _RANK] * (3 - len(steps))

        def make(args: Args) -> list:
            if not count:
                return []
            a, b, c = (*args.inputs, 0, 0)[:3]
            arguments = BroadcastArguments(a, b, c, args.outputs[0], (*(1,) * fill, *sizes), count, steps[0], steps[1], steps[2])
            return [launch("broadcast", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation="broadcast")


def _merge_axes(layer: Layer) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes of the result with adjacent axes merged if every operand is contiguous across them, and each operand's strides."""
    out = static_shape(layer.outputs[0].shape)
    rows: list[list[int]] = []
    for t in layer.required_inputs():
        shape = (*(1,) * (len(out) - t.type.rank), *static_shape(t.shape))
        rows.append([0 if shape[i] == 1 else prod(shape[i + 1 :]) for i in range(len(out))])
    sizes: list[int] = []
    joined: list[list[int]] = [[] for _ in rows]
    for i, d in enumerate(out):
        if d == 1:
            continue
        if sizes and all(j[-1] == r[i] * d for j, r in zip(joined, rows, strict=True)):
            sizes[-1] *= d
            for j, r in zip(joined, rows, strict=True):
                j[-1] = r[i]
        else:
            sizes.append(d)
            for j, r in zip(joined, rows, strict=True):
                j.append(r[i])
    return tuple(sizes), [tuple(j) for j in joined]

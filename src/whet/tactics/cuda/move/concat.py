"""Concatenation along channels of channels-last tensors, or any axis of row-major ones: in one launch, or by strided copies, one launch per input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

from whet.backends import Backend
from whet.backends.cuda.launch import Launch
from whet.network import Layer, compute_stored_shape, static_shape
from whet.network.types import BF16, F16
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, Fields, Int32, Pointer, UInt32, When, make_array_type
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda.move.reformat import RowsArguments

_PARTS = (2, 4, 8, 32)  # of a launch; the kernel is compiled for each
_FAR = 2**31 - 1
_MANY = 1 << 20  # units: from here on a thread moves several


@dataclass(frozen=True)
class ShiftFields(Fields):
    """Shifts of the parts' rows."""

    shift: Annotated[Sequence[int], make_array_type("u32", 32)]  # rows from a row of the result to that of each part, modulo 2^32
    period: UInt32  # rows within which they are shifted


@dataclass(frozen=True)
class ConcatArguments(Arguments, kernel="concat.cu"):
    out: Pointer
    input: Annotated[Sequence[int], make_array_type("const u8*", 32)]
    start: Annotated[Sequence[int], make_array_type("int", 33)]  # units of a row in front of each part; _FAR after the last
    count: UInt32  # units of all parts
    width: UInt32  # units of a row of all parts
    pitch: Int32  # units of a row of the result
    shifts: Annotated[ShiftFields | None, When("SHIFTED")] = None


@tactic
class Concat(Tactic):
    """Any element type of whole bytes."""

    ops = ("Concat",)
    version = 2

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or layer.op == "Fused" or not all_static(layer):
            return []
        own = layer.outputs[0].dtype
        kinds = [F16, BF16, own] if own.name == "f32" else [own]
        forms = ["nhwc", "linear"] if layer.outputs[0].type.rank == 4 else ["linear"]
        if own.bits < 8:
            return []
        return [Signature((Operand(f, k),) * len(layer.inputs), (Operand(f, k),)) for k in kinds for f in forms]

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        nbytes = prod(static_shape(layer.outputs[0].shape)) * signature.outputs[0].dtype.bits // 8
        return [(("joint", 1),), ()] if nbytes < 2**31 else [()]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        out = signature.outputs[0]
        rank = layer.outputs[0].type.rank
        axis = int(layer.attrs["axis"]) % rank
        place = axis if out.format == "linear" else (0, rank - 1, *range(1, rank - 1))[axis]
        size = out.dtype.bits // 8

        def width(t: Any) -> int:
            return prod(static_shape(compute_stored_shape(out.format, t.shape))[place:]) * size

        whole = static_shape(compute_stored_shape(out.format, layer.outputs[0].shape))
        rows, pitch = prod(whole[:place]), width(layer.outputs[0])
        widths = [width(t) for t in layer.inputs]
        unit = next(u for u in (16, 8, 4, 2, 1) if pitch % u == 0 and all(w % u == 0 for w in widths))
        make_launches = join if dict(config).get("joint") else _copy_parts

        def make(args: Args) -> list:
            return make_launches(args.inputs, args.outputs[0], widths, rows, pitch, unit)

        return GpuKernel(layer, signature, make, implementation=f"joint x{unit}" if config else "copies", rtol=0.0)


def _copy_parts(addresses: Sequence[int], out: int, widths: list[int], rows: int, pitch: int, unit: int) -> list[Launch]:
    """A launch for each part; sizes in bytes."""
    launches, at = [], 0
    unit = 4 if unit == 8 else unit
    for address, wide in zip(addresses, widths, strict=True):
        if rows and wide:
            arguments = RowsArguments(address, out + at, rows=rows, width=wide // unit, in_pitch=wide // unit, out_pitch=pitch // unit)
            launches.append(launch("rows", arguments, {"FROM": 0, "TO": 0, "UNIT": unit}, (count_blocks(rows * wide // unit, 256), 1, 1), 256))
        at += wide
    return launches


def join(
    addresses: Sequence[int], out: int, widths: list[int], rows: int, pitch: int, unit: int, *, shifts: Sequence[int] = (), period: int = 0
) -> list[Launch]:
    """A launch for each 32 parts; sizes in bytes. With `shifts` (of at most 32 parts) a part's rows are those so many rows further within each
    `period` of rows, and zeros beyond its ends."""
    most, launches, at = _PARTS[-1], [], 0
    parts = [(a, w // unit) for a, w in zip(addresses, widths, strict=True) if w]
    for first in range(0, len(parts) if rows else 0, most):
        group = parts[first : first + most]
        start = [sum(w for _, w in group[:k]) for k in range(len(group))]
        width = sum(w for _, w in group)
        free = most - len(group)
        sources, starts = (*(a for a, _ in group), *(0,) * free), (*start, *(_FAR,) * (free + 1))
        moved = ShiftFields([n % 2**32 for n in (*shifts, *(0,) * (most - len(shifts)))], period) if shifts else None
        arguments = ConcatArguments(out + at * unit, sources, starts, count=rows * width, width=width, pitch=pitch // unit, shifts=moved)
        each = 4 if rows * width >= _MANY else 1
        constants = {"UNIT": unit, "PARTS": next(n for n in _PARTS if n >= len(group)), "EACH": each} | ({"SHIFTED": 1} if shifts else {})
        launches.append(launch("concat", arguments, constants, (count_blocks(rows * width, 256 * each), 1, 1), 256))
        at += width
    return launches

"""Pad: constants, edges, reflections and wrapping, cutting too; row-major or channels last.

For coverage: no other kernel computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16
from whet.ops.pad import pad_amounts
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Pointer, UInt32, UInt64, make_array_type
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch, make_stored_signature

_RANK = 6
_MODES = {"constant": 0, "edge": 1, "reflect": 2, "wrap": 3}


@dataclass(frozen=True)
class PadArguments(Arguments, kernel="pad.cu"):
    input: ConstPointer
    out: Pointer
    value: UInt64  # the bits of a constant, repeated if several elements move as one
    stride: Annotated[Sequence[int], make_array_type("long long", 6)]  # of the input, in elements
    size: Annotated[Sequence[int], make_array_type("int", 6)]  # of the output
    before: Annotated[Sequence[int], make_array_type("int", 6)]  # output place of input element 0
    low: Annotated[Sequence[int], make_array_type("int", 6)]  # the input's elements that are left
    high: Annotated[Sequence[int], make_array_type("int", 6)]
    count: UInt32


@tactic
class Pad(Tactic):
    """At most six axes, elements of 1 to 8 bytes, amounts and value known when the engine is built."""

    ops = ("Pad",)
    version = 2

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x = layer.needs(0)
        if layer.op == "Fused" or x.type.rank > _RANK or x.dtype.bits % 8 or x.dtype.bits > 64:
            return f"takes single layers of at most {_RANK} axes with elements of 1, 2, 4 or 8 bytes"
        known = all(t is None or t.is_constant for t in layer.inputs[1:])
        return None if known else "the pads or the value are computed at run time"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        own = layer.outputs[0].dtype
        kinds = [F16, BF16, own] if own.name == "f32" else [own]
        forms = ("nhwc", "linear") if layer.outputs[0].type.rank == 4 else ("linear",)
        return [make_stored_signature(layer, {0: Operand(form, k)}, Operand(form, k)) for k in kinds for form in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if prod(static_shape(layer.outputs[0].shape)) >= 2**31:
            return "more than 2**31 elements"
        shape = static_shape(layer.needs(0).shape)
        for n, (a, b) in zip(shape, pad_amounts(layer), strict=True):
            left, most = n + min(a, 0) + min(b, 0), max(a, b)
            if (layer.attrs["mode"] == "reflect" and most >= max(left, 1)) or (layer.attrs["mode"] == "wrap" and most > left):
                return f"{most} elements of padding for {left}; takes at most one period"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        reason = self.refuses(layer, signature, backend)
        if reason:
            raise PlanRefused(reason)
        stored = signature.outputs[0]
        x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
        both = list(pad_amounts(layer))
        order = (0, 2, 3, 1) if stored.format == "nhwc" else tuple(range(len(x)))
        x, y, both = tuple(x[i] for i in order), tuple(y[i] for i in order), [both[i] for i in order]
        size = stored.dtype.bits // 8
        unit = find_unit(x, both, size)
        if unit > size:
            x, y = (*x[:-1], x[-1] * size // unit), (*y[:-1], y[-1] * size // unit)
        axes = list_pad_axes(x, y, both)
        t = layer.input(2)
        number = np.zeros((), layer.outputs[0].dtype.numpy) if t is None else np.asarray(t.array()).reshape(())
        with np.errstate(over="ignore"):
            bits = int.from_bytes(number.astype(stored.dtype.numpy).tobytes() * (min(unit, 8) // size), "little")
        count = prod(y)

        def make(args: Args) -> list:
            if not count:
                return []
            constants = {"UNIT": unit, "MODE": _MODES[layer.attrs["mode"]]}
            stride, size, before, low, high = zip(*axes, strict=True)
            arguments = PadArguments(args.inputs[0], args.outputs[0], bits, stride, size, before, low, high, count)
            return [launch("pad", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"pad x{unit}", rtol=0.0)


def find_unit(x: tuple[int, ...], both: Sequence[tuple[int, int]], size: int) -> int:
    """The bytes that move as one: adjacent elements of the last axis, if it is not padded."""
    if not x or both[-1] != (0, 0):
        return size
    return next((unit for unit in (16, 8, 4) if unit > size and x[-1] * size % unit == 0), size)


def list_pad_axes(x: tuple[int, ...], y: tuple[int, ...], both: list[tuple[int, int]]) -> list[tuple[int, int, int, int, int]]:
    """(stride, output size, before, low, high) of six axes, the missing ones first; see pad.cu."""
    axes, step = [], 1
    for n, out, (a, b) in zip(reversed(x), reversed(y), reversed(both), strict=True):
        axes.append((step, out, a, max(-a, 0), n - max(-b, 0)))
        step *= n
    return [(0, 1, 0, 0, 1)] * (_RANK - len(x)) + axes[::-1]

"""Gather: rows of a tensor, or of a constant table, at indices that are constant or computed at run time."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int32, Int64, Pointer
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch, make_packed_table


@dataclass(frozen=True)
class GatherArguments(Arguments, kernel="gather.cu"):
    input: ConstPointer
    at: ConstPointer
    out: Pointer
    count: Int64  # units of the result
    entries: Int32
    indices: Int32
    width: Int32


@tactic
class Gather(Tactic):
    """Along any axis of a row-major tensor. An index outside of the axis is held inside."""

    ops = ("Gather",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x, at = layer.required_inputs()
        if layer.op == "Fused" or x.dtype.bits % 8 or x.dtype.bits > 64:
            return "takes single layers with elements of 1, 2, 4 or 8 bytes"
        return None if at.dtype.name in ("i32", "i64") else "takes indices of 32 or 64 bits"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        x, at = layer.required_inputs()
        kinds = [F16, BF16, x.dtype] if x.dtype.name == "f32" else [x.dtype]
        index = None if at.is_constant else Operand("linear", at.dtype)
        return [Signature((Operand("linear", k), index), (Operand("linear", k),)) for k in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not static_shape(layer.needs(0).shape)[int(layer.attrs["axis"])]:
            return "the data are empty"
        return "more than 2**31 elements" if max(prod(static_shape(t.shape)) for t in (layer.needs(0), layer.outputs[0])) >= 2**31 else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        x, at = layer.required_inputs()
        shape = static_shape(x.shape)
        axis = int(layer.attrs["axis"]) % len(shape)
        size = signature.outputs[0].dtype.bits // 8
        width, indices = prod(shape[axis + 1 :]) * size, prod(static_shape(at.shape))
        unit = next(u for u in (16, 8, 4, 2, 1) if width % u == 0)
        packed: list[Packed] = []
        if at.is_constant:
            key = f"{at.constant().digest}|take i64"
            packed.append(make_packed_table(key, max(indices, 1) * 8, lambda: np.asarray(at.array(), np.int64).reshape(-1)))
        wide = at.is_constant or at.dtype.name == "i64"
        constants = {"UNIT": unit, "WIDE_INDEX": int(wide)}
        count = prod(shape[:axis]) * indices * (width // unit)

        def make(args: Args) -> list:
            if not count:
                return []
            where = args.packed[0] if at.is_constant else args.inputs[1]
            arguments = GatherArguments(
                input=args.inputs[0], at=where, out=args.outputs[0], count=count, entries=shape[axis], indices=indices, width=width // unit
            )
            return [launch("take", arguments, constants, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"take x{unit}", packed=packed, rtol=0.0)

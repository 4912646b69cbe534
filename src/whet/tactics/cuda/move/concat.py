"""Concatenation by strided copies, one launch per input: along channels of channels-last tensors, or any axis of row-major ones."""

from __future__ import annotations

from math import prod
from typing import Any

from whet.backends import Backend
from whet.network import Layer, static_shape, stored_shape
from whet.network.types import BF16, F16
from whet.tactics._base import Args, Config, Operand, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, blocks_of, launch
from whet.tactics.cuda.move.reformat import RowsArguments


@tactic
class Concat(Tactic):
    """Any element type of whole bytes."""

    ops = ("Concat",)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or layer.op == "Fused" or not all_static(layer):
            return []
        own = layer.outputs[0].dtype
        kinds = [F16, BF16, own] if own.name == "f32" else [own]
        forms = ["nhwc", "linear"] if layer.outputs[0].type.rank == 4 else ["linear"]
        if own.bits < 8:
            return []
        return [Signature((Operand(f, k),) * len(layer.inputs), (Operand(f, k),)) for k in kinds for f in forms]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        out = signature.outputs[0]
        rank = layer.outputs[0].type.rank
        axis = int(layer.attrs["axis"]) % rank
        place = axis if out.format == "linear" else (0, rank - 1, *range(1, rank - 1))[axis]
        size = out.dtype.bits // 8

        def width(t: Any) -> int:
            return prod(static_shape(stored_shape(out.format, t.shape))[place:]) * size

        whole = static_shape(stored_shape(out.format, layer.outputs[0].shape))
        rows, pitch = prod(whole[:place]), width(layer.outputs[0])
        widths = [width(t) for t in layer.inputs]
        unit = next(u for u in (16, 4, 2, 1) if pitch % u == 0 and all(w % u == 0 for w in widths))
        constants = {"FROM": 0, "TO": 0, "UNIT": unit}

        def make(args: Args) -> list:
            launches, at = [], 0
            for address, wide in zip(args.inputs, widths, strict=True):
                if rows and wide:
                    grid = (blocks_of(rows * wide // unit, 256), 1, 1)
                    arguments = RowsArguments(
                        address, args.outputs[0] + at, rows=rows, width=wide // unit, in_pitch=wide // unit, out_pitch=pitch // unit
                    )
                    launches.append(launch("rows", arguments, constants, grid, 256))
                at += wide
            return launches

        return GpuKernel(layer, signature, make, implementation="copies", rtol=0.0)

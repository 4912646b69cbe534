"""Moves without arithmetic: Transpose and Split of row-major tensors, Resize (nearest, whole factors) of channels-last images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16
from whet.ops.split import list_part_sizes
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstPointer, Int64, Pointer, UInt32, make_array_type
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch

_RANK = 6
Move = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Start, sizes of the result, and for each axis the stride in the source and the divisor of the index (elements)."""


@dataclass(frozen=True)
class PermuteArguments(Arguments, kernel="permute.cu"):
    input: ConstPointer
    out: Pointer
    start: Int64  # elements
    stride: Annotated[Sequence[int], make_array_type("long long", 6)]  # elements
    size: Annotated[Sequence[int], make_array_type("u32", 6)]
    divisor: Annotated[Sequence[int], make_array_type("u32", 6)]
    count: UInt32


@tactic
class Permute(Tactic):
    """One launch an output; at most six axes."""

    ops = ("Transpose", "Split", "Resize")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused" or layer.needs(0).type.rank > _RANK:
            return f"takes single layers of at most {_RANK} axes"
        if layer.needs(0).dtype.bits % 8 or layer.needs(0).dtype.bits > 64:
            return "takes elements of 1, 2, 4 or 8 bytes"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        own = layer.needs(0).dtype
        form = "nhwc" if layer.op == "Resize" else "linear"
        if form == "nhwc" and layer.needs(0).type.rank != 4:
            return []
        kinds = [F16, BF16, own] if own.name == "f32" else [own]
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand(form, k), *rest), (Operand(form, k),) * len(layer.outputs)) for k in kinds]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "the sizes are computed at run time"
        if max(prod(static_shape(t.shape)) for t in layer.outputs) >= 2**31:
            return "more than 2**31 elements"
        return _why_not_whole_factors(layer) if layer.op == "Resize" else None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        reason = self.refuses(layer, signature, backend)
        if reason:
            raise PlanRefused(reason)
        moves = _list_moves(layer)
        size = signature.outputs[0].dtype.bits // 8
        unit = size
        for wider in (16, 8, 4):  # runs of adjacent elements move as one
            run = wider // size
            if wider > size and all(m[2][-1] == 1 and m[3][-1] == 1 and not any(v % run for v in (m[0], m[1][-1], *m[2][:-1])) for m in moves):
                moves, unit = [_move_runs(m, run) for m in moves], wider
                break

        def make(args: Args) -> list:
            found = []
            for out, (start, shape, strides, divisors) in zip(args.outputs, moves, strict=True):
                count, fill = prod(shape), _RANK - len(shape)
                if not count:
                    continue
                walk = ((0,) * fill + strides, (1,) * fill + shape, (1,) * fill + divisors)
                arguments = PermuteArguments(args.inputs[0], out, start, *walk, count=count)
                found.append(launch("gather", arguments, {"UNIT": unit}, (count_blocks(count, 256), 1, 1), 256))
            return found

        return GpuKernel(layer, signature, make, implementation=f"gather x{unit}", rtol=0.0)


def _move_runs(move: Move, run: int) -> Move:
    start, shape, strides, divisors = move
    return start // run, (*shape[:-1], shape[-1] // run), (*(s // run for s in strides[:-1]), 1), divisors


def _list_moves(layer: Layer) -> list[Move]:
    """The part of the input for each output, in stored order."""
    shape = static_shape(layer.needs(0).shape)
    strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    if layer.op == "Transpose":
        perm = layer.attrs["perm"]
        return [(0, tuple(shape[p] for p in perm), tuple(strides[p] for p in perm), (1,) * len(shape))]
    if layer.op == "Split":
        axis, at, parts = int(layer.attrs["axis"]) % len(shape), 0, []
        for part in list_part_sizes(layer):
            parts.append((at * strides[axis], (*shape[:axis], int(part), *shape[axis + 1 :]), strides, (1,) * len(shape)))
            at += int(part)
        return parts
    n, c, h, w = shape
    _, _, p, q = static_shape(layer.outputs[0].shape)
    return [(0, (n, p, q, c), (h * w * c, w * c, c, 1), (1, p // h, q // w, 1))]


def _why_not_whole_factors(layer: Layer) -> str | None:
    """Why a Resize is no repetition of pixels, or None."""
    a, source, target = layer.attrs, static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    if a.get("mode", "nearest") != "nearest":
        return "takes nearest-neighbour resizes only"
    if source[:2] != target[:2] or target[2] % source[2] or target[3] % source[3]:
        return f"from {list(source)} to {list(target)} is not an enlargement by whole factors"
    where, rounding = a.get("coordinate_transformation_mode", "half_pixel"), a.get("nearest_mode", "round_prefer_floor")
    plain = where == "asymmetric" and rounding == "floor"
    centred = where in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric") and rounding in ("round_prefer_floor", "round_prefer_ceil")
    return None if plain or centred else f"{where} with {rounding} does not repeat pixels"

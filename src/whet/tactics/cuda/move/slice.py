"""Slice, Expand and Gather of one constant index: other start offsets and strides of the same bytes."""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import BF16, F16
from whet.ops.slice import slice_ranges
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, count_blocks, launch
from whet.tactics.cuda.move.permute import PermuteArguments

_RANK = 6


@tactic
class Slice(Tactic):
    """Row-major, up to six axes, steps of either sign; slices of channels-last tensors as well."""

    ops = ("Slice", "Expand", "Gather")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x = layer.needs(0)
        if layer.op == "Fused" or x.dtype.bits % 8 or x.dtype.bits > 64:
            return "takes single layers with elements of 1, 2, 4 or 8 bytes"
        if any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "bounds or indices are computed at run time"
        if layer.op == "Gather" and layer.needs(1).array().size != 1:
            return "takes one index, not several"
        return f"more than {_RANK} axes" if max(x.type.rank, layer.outputs[0].type.rank) > _RANK else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        own = layer.needs(0).dtype
        kinds = [F16, BF16, own] if own.name == "f32" else [own]
        rest = (None,) * (len(layer.inputs) - 1)
        forms = ("nhwc", "linear") if layer.op == "Slice" and layer.outputs[0].type.rank == 4 else ("linear",)
        return [Signature((Operand(f, k), *rest), (Operand(f, k),)) for k in kinds for f in forms]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if prod(static_shape(layer.outputs[0].shape)) >= 2**31:
            return "more than 2**31 elements"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        if self.refuses(layer, signature, backend):
            raise PlanRefused("more than 2**31 elements")
        start, sizes, strides = _view(layer, signature.outputs[0].format)
        size = signature.outputs[0].dtype.bits // 8
        unit = size
        for wider in (16, 8, 4):  # runs of adjacent elements move as one
            run = wider // size
            if wider > size and sizes and strides[-1] == 1 and not any(v % run for v in (start, sizes[-1], *strides[:-1])):
                start, sizes, strides, unit = start // run, (*sizes[:-1], sizes[-1] // run), (*(s // run for s in strides[:-1]), 1), wider
                break
        fill, count = _RANK - len(sizes), prod(sizes)

        def make(args: Args) -> list:
            if not count:
                return []
            walk = ((*(0,) * fill, *strides), (*(1,) * fill, *sizes), (1,) * _RANK)
            arguments = PermuteArguments(args.inputs[0], args.outputs[0], start, *walk, count=count)
            return [launch("gather", arguments, {"UNIT": unit}, (count_blocks(count, 256), 1, 1), 256)]

        return GpuKernel(layer, signature, make, implementation=f"slice x{unit}", rtol=0.0)


def _view(layer: Layer, form: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Start, sizes of the result and strides into the input, in elements and in stored order."""
    shape, out = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if layer.op == "Expand":
        lead = len(out) - len(shape)
        return 0, out, tuple(0 if i < lead or shape[i - lead] == 1 else strides[i - lead] for i in range(len(out)))
    if layer.op == "Gather":
        axis = int(layer.attrs["axis"]) % len(shape)
        index = int(layer.needs(1).array().reshape(-1)[0]) % max(shape[axis], 1)
        ones = (0,) * layer.needs(1).type.rank
        return index * strides[axis], out, (*strides[:axis], *ones, *strides[axis + 1 :])
    start, images = 0, form == "nhwc"
    if images:
        _, c, h, w = shape
        strides = [h * w * c, 1, w * c, c]
    for axis, (first, _, step) in slice_ranges(layer).items():
        start += int(first) * strides[axis]
        strides[axis] *= int(step)
    order = (0, 2, 3, 1) if images else tuple(range(len(out)))
    return start, tuple(out[d] for d in order), tuple(strides[d] for d in order)

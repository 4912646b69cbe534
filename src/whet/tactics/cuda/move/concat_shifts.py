"""Shifted copies of tensors, concatenated along the last axis in one launch: concat.cu with SHIFTED.

Not measured yet: the selections of an H200 were recorded before it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.ops.pad import find_shift
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.kernel import GpuKernel, all_static, list_float_types, make_stored_signature
from whet.tactics.cuda.move.concat import join


def list_parts(layer: Layer) -> list[tuple[int, int, int]] | None:
    """(index of the input, axis, shift) of each part of a fused layer; None for another body."""
    body = layer.regions["body"]
    last = body.layers[-1]
    if last.op != "Concat" or body.outputs != [last.outputs[0]] or any(x.op != "Pad" for x in body.layers[:-1]):
        return None
    places, padded = {t: i for i, t in enumerate(body.inputs)}, {x.outputs[0]: x for x in body.layers[:-1]}
    parts = []
    for t in last.inputs:
        pad = None if t is None else padded.get(t)
        source = t if pad is None else pad.inputs[0]
        shift = (0, 0) if pad is None else find_shift(pad)
        if source not in places or shift is None:
            return None
        parts.append((places[source], *shift))
    shifted = {axis for _, axis, n in parts if n}
    rank = last.output.type.rank
    if int(last.attrs["axis"]) % rank != rank - 1 or len(shifted) > 1 or rank - 1 in shifted or len(static_shape(last.output.shape)) != rank:
        return None
    axis = next(iter(shifted), 0)
    return [(i, axis, n) for i, _, n in parts]


@tactic
class ConcatShifts(Tactic):
    """Layers of the pass fuse_concat_shifts: row-major floats of one type."""

    ops = ("*",)
    composites = ("ConcatShifts",)
    what = "a Concat of shifted copies"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer) or list_parts(layer) is None:
            return []
        types = list_float_types([*layer.inputs, layer.outputs[0]])
        return [make_stored_signature(layer, {i: Operand("linear", t) for i in range(len(layer.inputs))}, Operand("linear", t)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        nbytes = prod(static_shape(layer.outputs[0].shape)) * signature.outputs[0].dtype.bits // 8
        return "more than 2**31 bytes" if nbytes >= 2**31 else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        return [()]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts, shape = list_parts(layer), static_shape(layer.outputs[0].shape)
        if parts is None:
            raise PlanRefused("the body is not a Concat of shifted copies")
        size, axis = signature.outputs[0].dtype.bits // 8, parts[0][1]
        inner = prod(shape[axis + 1 : -1])  # rows from position to position of the axis
        widths = [static_shape(layer.needs(i).shape)[-1] * size for i, _, _ in parts]
        pitch = shape[-1] * size
        unit = next(u for u in (16, 8, 4, 2, 1) if all(w % u == 0 for w in widths))
        shifts = [-n * inner for _, _, n in parts]

        def make(args: Args) -> list:
            sources = [args.inputs[i] for i, _, _ in parts]
            return join(sources, args.outputs[0], widths, prod(shape[:-1]), pitch, unit, shifts=shifts, period=shape[axis] * inner)

        return GpuKernel(layer, signature, make, implementation=f"shifted x{unit}", rtol=0.0)

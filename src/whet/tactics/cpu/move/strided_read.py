"""Expand, Slice and Transpose of element types that oneDNN does not move, such as i64 and bool, and of constants: parts of them by a dynamic size.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.formats import compute_strides
from whet.ops.slice import slice_ranges
from whet.tactics._base import Config, Operand, PlanRefused, Signature, tactic
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu.move._strided_copy_ir import AXES
from whet.tactics.cpu.move.strided_copy import Axes, StridedCopyKernel, merge_axes
from whet.tactics.cpu.onednn._kernel import is_static

_ONEDNN = ("f32", "bf16", "i32", "i8", "u8")


@tactic
class StridedRead(CompiledTactic):
    ops = ("Expand", "Slice", "Transpose")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if any(t is not None and not t.is_constant and t.shape_value is None for t in layer.inputs[1:]):
            return "its sizes are computed at run time"
        x = layer.needs(0)
        if x.dtype.bits not in (8, 16, 32, 64):
            return "moves elements of whole bytes"
        if layer.op != "Expand" and not x.is_constant and x.dtype.name in _ONEDNN:
            return f"oneDNN moves {x.dtype}"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        x, absent = layer.needs(0), (None,) * (len(layer.inputs) - 1)
        row_major = Operand("linear", x.dtype)
        return [Signature((None if x.is_constant else row_major, *absent), (row_major,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        return None if find_read_axes(layer)[0] else f"more than {AXES} axes remain after adjacent ones are merged"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> StridedCopyKernel:
        axes, offset = find_read_axes(layer)
        if axes is None or self.why_not(layer):
            raise PlanRefused(self.why_not(layer) or self.refuses(layer, signature, backend) or "")
        return StridedCopyKernel(layer, signature, axes, backend.threads, offset)


def find_read_axes(layer: Layer) -> tuple[Axes | None, int]:
    """(axes of the copy, or None if there are too many; the first element that is read) of row-major tensors with static shapes."""
    source, shape = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    steps, offset = list(compute_strides("linear", source)), 0
    if layer.op == "Expand":
        steps = [0] * (len(shape) - len(source)) + [0 if n == 1 else s for n, s in zip(source, steps, strict=True)]
    elif layer.op == "Slice":
        for axis, (start, _, step) in slice_ranges(layer).items():
            offset += start * steps[axis]
            steps[axis] *= step
    else:
        steps = [steps[p] for p in layer.attrs.get("perm") or range(len(source))[::-1]]
    return merge_axes(list(zip(shape, steps, strict=True))), offset

"""Transposes, and Reformats between row-major and channels last, of any element type: for CPUs without oneDNN."""

from __future__ import annotations

from math import prod

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.formats import compute_strides
from whet.network.types import DTYPES
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.move._strided_copy_ir import AXES, WORDS, emit_strided_copy_ir
from whet.tactics.cpu.onednn._kernel import is_static

_FORMATS = ("linear", "nhwc")
_VECTOR = 32  # bytes
_ELEMENTS = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}

Axes = list[tuple[int, int]]
"""The result's axes in memory order: size, and stride of the source in elements."""


class StridedCopyKernel(CompiledKernel):
    serial_work = 1 << 14  # elements
    implementation = "strided copy"

    def __init__(self, layer: Layer, signature: Signature, axes: Axes, count: int) -> None:
        super().__init__(layer, signature, prod(n for n, _ in axes), count)
        bits = signature.outputs[0].dtype.bits
        self.lines = axes[0][0] * axes[1][0]
        self.threads = min(self.threads, self.lines)
        self.words = [*(n for n, _ in axes), *(s for _, s in axes), self.lines]
        self.ir = emit_strided_copy_ir(_ELEMENTS[bits], 8 * _VECTOR // bits if axes[-1][1] == 1 else 1)

    def enqueue(self, args: Args, stream: Stream) -> None:
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), *self.words]
        assert len(words) == len(WORDS) - 2
        self.launch(stream, self.ir, "strided_copy", args, words, self.lines)


@tactic
class StridedCopy(CompiledTactic):
    ops = ("Reformat", "Transpose")
    opt_in, instead_of = True, "ONEDNN"

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        a = layer.attrs
        if layer.op == "Fused" or layer.needs(0).is_constant:
            return "takes single layers, not fused ones, and no constants"
        if layer.op == "Reformat" and (a["source_dtype"] != a["dtype"] or any(a[n] not in _FORMATS for n in ("source_format", "format"))):
            return "moves between row-major and channels last, and converts no values"
        if layer.outputs[0].dtype.bits not in _ELEMENTS:
            return "moves elements of whole bytes"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        a, dtype = layer.attrs, layer.outputs[0].dtype
        if layer.op == "Reformat":
            return [Signature((Operand(a["source_format"], DTYPES[a["source_dtype"]]),), (Operand(a["format"], DTYPES[a["dtype"]]),))]
        return [Signature((Operand("linear", dtype),), (Operand("linear", dtype),))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        return None if find_copied_axes(layer, signature) else f"more than {AXES} axes remain after adjacent ones are merged"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> StridedCopyKernel:
        axes = find_copied_axes(layer, signature)
        if axes is None or self.why_not(layer):
            raise PlanRefused(self.why_not(layer) or self.refuses(layer, signature, backend) or "")
        return StridedCopyKernel(layer, signature, axes, backend.threads)


def find_copied_axes(layer: Layer, signature: Signature) -> Axes | None:
    """The axes of the copy, or None if there are too many."""
    source, shape = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    steps = compute_strides(signature.needs(0).format, source)
    if layer.op == "Transpose":
        perm = layer.attrs.get("perm") or tuple(range(len(source)))[::-1]
        steps = tuple(steps[p] for p in perm)
    own = compute_strides(signature.outputs[0].format, shape)
    order = sorted(range(len(shape)), key=lambda i: (-own[i], i))
    return merge_axes([(shape[i], steps[i]) for i in order])


def merge_axes(axes: Axes) -> Axes | None:
    """The same copy with exactly AXES axes: adjacent ones are merged, further ones have size 1. None if there are too many."""
    merged: Axes = []
    for size, step in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    if len(merged) > AXES:
        return None
    if len(merged) == AXES:
        return merged
    lead: Axes = [(1, 0)] * (AXES - len(merged))
    return [*lead, *merged] if len(merged) == AXES - 1 else [*lead[1:], *merged[:1], (1, 0), *merged[1:]] if merged else [(1, 0)] * AXES

"""Transposes, and Reformats between row-major, channels last and blocks of channels, of any element type: for CPUs without oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import FORMATS, Layer, format_fits, static_shape
from whet.network.formats import compute_strides, find_block
from whet.network.types import DTYPES
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.conv._indirect_kernel import count_lanes
from whet.tactics.cpu.move._strided_copy_ir import AXES, WORDS, emit_strided_copy_ir
from whet.tactics.cpu.onednn._kernel import is_static

_VECTOR = 32  # bytes
_ELEMENTS = {8: "i8", 16: "i16", 32: "i32", 64: "i64"}

Axes = list[tuple[int, int, int]]
"""The copied axes in the order of the result's memory: size, and strides of the source and of the result in elements."""


@dataclass(frozen=True)
class Part:
    """A copy of AXES axes from an element of the source to one of the result; `zeros` follow each row (a size of the last axis, without merging)."""

    axes: Axes
    first: tuple[int, int] = (0, 0)
    zeros: int = 0
    is_short: bool = False  # rows are blocks of channels


class StridedCopyKernel(CompiledKernel):
    """A planned copy, with a launch for each part."""

    serial_work = 1 << 14  # elements
    implementation = "strided copy"

    def __init__(self, layer: Layer, signature: Signature, parts: list[Part], count: int) -> None:
        super().__init__(layer, signature, max(prod(n for n, _, _ in p.axes) for p in parts), count)
        self.parts, self.bits = parts, signature.outputs[0].dtype.bits

    def enqueue(self, args: Args, stream: Stream) -> None:
        for part in self.parts:
            axes = part.axes
            (*_, (_, step2, _), (width, step3, out3)), lines = axes, axes[0][0] * axes[1][0]
            is_tiled = self.bits == 32 and step2 == 1 and out3 == 1 and step3 != 1 and min(axes[2][0], width) >= count_lanes() and not part.zeros
            vector = 8 * _VECTOR // self.bits if step3 == out3 == 1 else 1
            is_short = part.is_short and not is_tiled
            ir = emit_strided_copy_ir(
                _ELEMENTS[self.bits], count_lanes() if is_tiled else vector, is_tiled, width if is_short else 0, part.zeros
            )  # fmt: skip
            words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), *(a[k] for k in range(3) for a in axes), *part.first, lines]
            assert len(words) == len(WORDS) - 2
            self.launch(stream, ir, "strided_copy", args, words, lines)


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
        if layer.op == "Reformat":
            forms = (a["source_format"], a["format"])
            if a["source_dtype"] != a["dtype"] or any(f not in FORMATS or not format_fits(f, layer.outputs[0].type.rank) for f in forms):
                return "moves between formats of a rank, and converts no values"
            if len({b for b in map(find_block, forms) if b > 1}) > 1:
                return "takes blocks of one size"
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
        return None if find_copied_parts(layer, signature) else f"more than {AXES} axes remain after adjacent ones are merged"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> StridedCopyKernel:
        parts = find_copied_parts(layer, signature)
        if parts is None or self.why_not(layer):
            raise PlanRefused(self.why_not(layer) or self.refuses(layer, signature, backend) or "")
        return StridedCopyKernel(layer, signature, parts, backend.threads)


def find_copied_parts(layer: Layer, signature: Signature) -> list[Part] | None:
    """The copies, or None if one has too many axes."""
    source, shape = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    forms = signature.needs(0).format, signature.outputs[0].format
    block = max(map(find_block, forms))
    if block > 1:
        return _find_blocks(shape, forms, block)
    steps = compute_strides(forms[0], source)
    if layer.op == "Transpose":
        perm = layer.attrs.get("perm") or tuple(range(len(source)))[::-1]
        steps = tuple(steps[p] for p in perm)
    axes = _merge_axes(list(zip(shape, steps, compute_strides(forms[1], shape), strict=True)))
    return None if axes is None else [Part(axes)]


def _find_blocks(shape: tuple[int, ...], forms: tuple[str, ...], block: int) -> list[Part] | None:
    """Whole blocks of channels, then the channels of a last one that is not full; zeros follow them in a blocked result."""
    samples, channels, height, width = shape
    whole, rest = divmod(channels, block)
    strides = [_compute_block_strides(f, shape, block) for f in forms]
    zeros = block - rest if find_block(forms[1]) > 1 else 0
    parts = []
    for blocks, first, taken, padding in ((whole, 0, block, 0), (1, whole, rest, zeros)):
        if not blocks or not taken:
            continue
        axes = _merge_axes(list(zip((samples, blocks, taken, height, width), *strides, strict=True)), whole_rows=padding > 0)
        if axes is None:
            return None
        parts.append(Part(axes, (first * strides[0][1], first * strides[1][1]), padding, is_short=axes[-1][0] == taken))
    return parts


def _compute_block_strides(form: str, shape: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Strides of samples, blocks of channels, channels of a block, rows and columns."""
    _, channels, height, width = shape
    if find_block(form) > 1:
        return -(-channels // block) * height * width * block, height * width * block, 1, width * block, block
    n, c, y, x = compute_strides(form, shape)
    return n, c * block, c, y, x


def _merge_axes(axes: Axes, whole_rows: bool = False) -> Axes | None:
    """The same copy in the order of the result, with exactly AXES axes: adjacent ones are merged, and further ones have size 1. None if there are too
    many. `whole_rows`: the innermost axis stays as it is."""
    ordered = sorted(axes, key=lambda a: -a[2])
    merged: Axes = []
    for k, (size, step, out) in enumerate(ordered):
        keeps = whole_rows and k == len(ordered) - 1
        if size == 1 and not keeps:
            continue
        if merged and not keeps and merged[-1][1:] == (size * step, size * out):
            merged[-1] = (merged[-1][0] * size, step, out)
        else:
            merged.append((size, step, out))
    if len(merged) > AXES:
        return None
    # lines are the first two axes, so that threads share the longest ones
    lead: Axes = [(1, 0, 0)] * (AXES - len(merged))
    if len(merged) >= AXES - 1:
        return [*lead, *merged]
    return [*lead[1:], *merged[:1], (1, 0, 0), *merged[1:]] if merged else [(1, 0, 1)] * AXES

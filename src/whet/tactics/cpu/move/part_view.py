"""Concat, Split and Slice without a copy: parts that are contiguous in the whole tensor are views of its bytes.

Parts are contiguous if every axis before the split one (in the order of the format) has length 1: row-major and channel blocks along the
channels of a batch of one, the first axis of any tensor. In nhwc along the channels the parts are interleaved.
"""

from __future__ import annotations

from itertools import accumulate

from whet.backends import Backend
from whet.errors import EngineError
from whet.network import Layer, Tensor, compute_stored_shape, format_fits, static_shape
from whet.ops.slice import slice_ranges
from whet.tactics._base import Args, Config, Operand, Signature, Stream, Tactic, ViewKernel, count_stored_bytes, tactic
from whet.tactics.cpu.onednn._kernel import is_static, list_image_formats, list_storage_types

_ALIGNMENT = 64  # bytes: kernels may read and write vectors at the beginning of a part
_BLOCKED = {"nChw8c": 8, "nChw16c": 16}


class PartKernel(ViewKernel):
    """Records no launch. `shifts` has the offset in bytes of the smaller tensor in the larger one, for each in-place pair."""

    scratch, packed, rtol, deterministic, implementation = 0, (), 0.0, True, "in place, nothing to do"

    def __init__(self, layer: Layer, signature: Signature, shifts: tuple[int, ...]) -> None:
        self.name, self.pairs, self.shifts = layer.name, signature.inplace, shifts
        self.inputs, self.outputs = count_stored_bytes(layer, signature)

    def enqueue(self, args: Args, stream: Stream) -> None:
        """Raises EngineError if a part is not at its offset; there is nothing to launch."""
        for (i, j), shift in zip(self.pairs, self.shifts, strict=True):
            whole, part = (args.outputs[j], args.inputs[i]) if self.inputs[i] <= self.outputs[j] else (args.inputs[i], args.outputs[j])
            if part != whole + shift:
                raise EngineError(f"layer '{self.name}' works in place, but its part {i}->{j} is not at offset {shift} of the whole")


@tactic
class PartView(Tactic):
    ops = ("Concat", "Split", "Slice")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        data = layer.inputs if layer.op == "Concat" else layer.inputs[:1]
        if any(t is None or t.is_constant for t in data):
            return "a part or the whole is constant"
        if len({id(t) for t in data}) < len(data):
            return "one tensor is concatenated twice"
        if layer.op == "Slice" and any(t is not None and t.shape_value is None for t in layer.inputs[1:]):
            return "the range of the Slice is computed at run time"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        whole = layer.outputs[0] if layer.op == "Concat" else layer.needs(0)
        signatures = []
        floats = list_storage_types([whole], backend)
        others = [whole.dtype] if whole.dtype.bits >= 8 and whole.dtype.name != "string" else []
        for d in floats or others:
            for f in list_image_formats(whole.type.rank) if floats else ("linear",):
                o = Operand(f, d)
                if _find_shifts(layer, o) is not None:
                    signatures.append(_make_signature(layer, o))
        return signatures

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return None if _find_shifts(layer, signature.outputs[0]) is not None else "its parts are not contiguous"

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> PartKernel:
        shifts = _find_shifts(layer, signature.outputs[0])
        assert shifts is not None, "refuses() said so"
        return PartKernel(layer, signature, shifts)


def _make_signature(layer: Layer, o: Operand) -> Signature:
    if layer.op == "Concat":
        return Signature((o,) * len(layer.inputs), (o,), tuple((i, 0) for i in range(len(layer.inputs))))
    absent = (None,) * (len(layer.inputs) - 1)
    return Signature((o, *absent), (o,) * len(layer.outputs), tuple((0, j) for j in range(len(layer.outputs))))


def _find_shifts(layer: Layer, o: Operand) -> tuple[int, ...] | None:
    """Offset of each part in bytes, or None if the parts are not contiguous."""
    whole = layer.outputs[0] if layer.op == "Concat" else layer.needs(0)
    if not format_fits(o.format, whole.type.rank):
        return None
    shape = static_shape(whole.shape)
    parts: list[Tensor] = [t for t in layer.inputs if t is not None] if layer.op == "Concat" else list(layer.outputs)
    if layer.op == "Slice":
        cut = {a: r for a, r in slice_ranges(layer).items() if not (r[0] == 0 and r[1] == shape[a] and r[2] == 1)}
        if len(cut) != 1:
            return None
        ((axis, (first, _, step)),) = cut.items()
        if step != 1 or not isinstance(first, int):
            return None
        starts = [first]
    else:
        axis = layer.attrs["axis"] % len(shape)
        starts = list(accumulate((static_shape(t.shape)[axis] for t in parts[:-1]), initial=0))
    return _find_offsets(o, shape, axis, starts, [static_shape(t.shape)[axis] for t in parts])


def _find_offsets(o: Operand, shape: tuple[int, ...], axis: int, starts: list[int], lengths: list[int]) -> tuple[int, ...] | None:
    """Offsets in bytes of the parts that begin at `starts` along `axis`, if each is contiguous and aligned to 64 bytes."""
    block = _BLOCKED.get(o.format, 1) if axis == 1 else 1
    stored = static_shape(compute_stored_shape(o.format, shape))
    place = axis if o.format != "nhwc" else (0, len(shape) - 1, *range(1, len(shape) - 1))[axis]
    if any(d != 1 for d in stored[:place]):
        return None
    for at, length in zip(starts, lengths, strict=True):
        if at % block or (length % block and at + length != shape[axis]):
            return None  # a block would hold channels of two parts
    step = o.dtype.bits // 8
    for d in stored[place + 1 :]:
        step *= d
    shifts = tuple(s // block * step for s in starts)
    return None if any(s % _ALIGNMENT for s in shifts) else shifts

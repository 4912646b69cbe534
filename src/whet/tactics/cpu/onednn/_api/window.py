"""Pooling, resampling and reduction."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu.onednn._api.attributes import Attributes, lookup
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build

_INFERENCE = 96
POOLING = {"max": 0x1FF, "avg_include_padding": 0x2FF, "avg_exclude_padding": 0x3FF}
RESAMPLING = {"nearest": 0x2FFF0, "linear": 0x2FFF1}
REDUCTION = {"max": 0x2FFF2, "min": 0x2FFF3, "sum": 0x2FFF4, "mul": 0x2FFF5, "mean": 0x2FFF6, "norm_max": 0x2FFF7, "norm_sum": 0x2FFF8,
             "norm_power_max": 0x2FFF9, "norm_power_sum": 0x2FFFA}  # fmt: skip


def pooling(
    alg: str,
    src: MemoryDesc,
    dst: MemoryDesc,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: tuple[Sequence[int], Sequence[int]],
    attributes: Attributes = NO_ATTRIBUTES,
) -> Descriptor:
    """Pooling by `alg` of POOLING; dilations count as ONNX counts (1 is none). The end pads must make the shapes fit exactly."""
    code = lookup(POOLING, alg, "pooling")
    geometry = [list(v) for v in (strides, kernel, [d - 1 for d in dilations], *pads)]
    return build("pooling_forward", ("src", "dst"), attributes, _INFERENCE, code, src, dst, *geometry)


def resampling(
    alg: str, src: MemoryDesc, dst: MemoryDesc, factors: Sequence[float] | None = None, attributes: Attributes = NO_ATTRIBUTES
) -> Descriptor:
    """Resize of the spatial axes with half-pixel centres: `nearest` rounds halves away from zero, `linear` interpolates along each."""
    code = lookup(RESAMPLING, alg, "resampling")
    values = [float(f) for f in factors] if factors else None
    return build("resampling_forward", ("src", "dst"), attributes, _INFERENCE, code, values, src, dst)


def reduction(
    alg: str, src: MemoryDesc, dst: MemoryDesc, p: float = 0.0, eps: float = 0.0, attributes: Attributes = NO_ATTRIBUTES
) -> Descriptor:
    """Reduction over the axes along which dst has length 1 and src has not; the norms take `p` and `eps`."""
    code = lookup(REDUCTION, alg, "reduction")
    return build("reduction", ("src", "dst"), attributes, code, src, dst, p, eps)

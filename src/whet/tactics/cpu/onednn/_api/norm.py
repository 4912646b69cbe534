"""Softmax and layer normalization."""

from __future__ import annotations

from whet.tactics.cpu.onednn._api.attributes import Attributes
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build

_INFERENCE, _SOFTMAX, _LOG_SOFTMAX = 96, 0x30000, 0x30001
_USE_SCALE, _USE_SHIFT = 2, 4


def softmax(src: MemoryDesc, dst: MemoryDesc, axis: int, *, log: bool = False, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """Softmax, or its logarithm, along one axis (not negative). src and dst may be one buffer."""
    alg = _LOG_SOFTMAX if log else _SOFTMAX
    return build("softmax_forward", ("src", "dst"), attributes, _INFERENCE, alg, src, dst, axis)


def layer_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    epsilon: float,
    *,
    scale: bool,
    shift: bool,
    attributes: Attributes = NO_ATTRIBUTES,
) -> Descriptor:
    """Normalization over the last axis; `scale` and `shift` are f32 vectors of that length. Rank 2 or more."""
    operands = ("src", *(("scale",) if scale else ()), *(("shift",) if shift else ()), "dst")
    flags = _USE_SCALE * scale | _USE_SHIFT * shift
    return build("layer_normalization_forward", operands, attributes, _INFERENCE, src, dst, None, epsilon, flags)

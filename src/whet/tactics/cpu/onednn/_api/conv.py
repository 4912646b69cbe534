"""Convolution and deconvolution."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu.onednn._api.attributes import Attributes
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build

_INFERENCE, _CONV_DIRECT, _DECONV_DIRECT = 96, 1, 0xA


def convolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: tuple[Sequence[int], Sequence[int]],
    attributes: Attributes = NO_ATTRIBUTES,
    *,
    transposed: bool = False,
) -> Descriptor:
    """A convolution of 1 to 3 spatial axes, or with `transposed` a deconvolution.

    Shapes: src (N, IC, ...), dst (N, OC, ...), weights (OC, IC, ...) or with groups (G, OC/G, IC/G, ...), also when transposed.
    `dilations` count as ONNX counts (1 is none); `pads` are (begins, ends), a negative end leaves a rest of the input unread.
    """
    kind, alg = ("deconvolution", _DECONV_DIRECT) if transposed else ("convolution", _CONV_DIRECT)
    geometry = (list(strides), [d - 1 for d in dilations], *(list(p) for p in pads))
    operands = ("src", "weights", "bias", "dst") if bias else ("src", "weights", "dst")
    return build(f"{kind}_forward", operands, attributes, _INFERENCE, alg, src, weights, bias, dst, *geometry)

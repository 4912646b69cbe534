"""Matrix products: matmul with batch axes, and inner product (fully connected)."""

from __future__ import annotations

from whet.tactics.cpu.onednn._api.attributes import Attributes
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build

_INFERENCE = 96


def matmul(
    src: MemoryDesc, weights: MemoryDesc, bias: MemoryDesc | None, dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES
) -> Descriptor:
    """dst = src @ weights + bias: (..., M, K), (..., K, N), (..., M, N), of one rank; batch axes of 1 broadcast.

    Bias has the rank of dst, with 1 where it broadcasts. A transposed operand is one described with swapped strides.
    """
    operands = ("src", "weights", "bias", "dst") if bias else ("src", "weights", "dst")
    return build("matmul", operands, attributes, src, weights, bias, dst)


def inner_product(
    src: MemoryDesc, weights: MemoryDesc, bias: MemoryDesc | None, dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES
) -> Descriptor:
    """dst (N, OC) = src (N, IC, ...) . weights (OC, IC, ...) + bias (OC)."""
    operands = ("src", "weights", "bias", "dst") if bias else ("src", "weights", "dst")
    return build("inner_product_forward", operands, attributes, _INFERENCE, src, weights, bias, dst)

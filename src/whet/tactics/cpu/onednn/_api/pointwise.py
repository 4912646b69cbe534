"""Element by element: activations, binary operations with broadcasting, PReLU, and the sum of several tensors."""

from __future__ import annotations

from collections.abc import Sequence

from whet.tactics.cpu.onednn._api.attributes import BINARY, ELTWISE, Attributes, lookup
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build

_INFERENCE = 96


def eltwise(
    alg: str, src: MemoryDesc, dst: MemoryDesc, alpha: float = 0.0, beta: float = 0.0, attributes: Attributes = NO_ATTRIBUTES
) -> Descriptor:
    """dst = alg(src; alpha, beta); the names and parameters of attributes.ELTWISE. src and dst may be one buffer."""
    code = lookup(ELTWISE, alg, "activation")
    return build("eltwise_forward", ("src", "dst"), attributes, _INFERENCE, code, src, dst, alpha, beta)


def binary(alg: str, src: MemoryDesc, src1: MemoryDesc, dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """dst = src <alg> src1, of one rank; src1 (and since 3.0 src) broadcasts along axes of 1. src and dst may be one buffer."""
    code = lookup(BINARY, alg, "binary operation")
    return build("binary", ("src", "src1", "dst"), attributes, code, src, src1, dst)


def prelu(src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """dst = src if positive, else src * weights; weights broadcast along axes of 1."""
    operands = ("src", "weights", "dst")
    return build("prelu_forward", operands, attributes, _INFERENCE, src, weights, dst)


def sum_of(sources: Sequence[MemoryDesc], scales: Sequence[float], dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """dst = sum of scales[i] * sources[i], all of one shape; operands `multi0`, `multi1`, ..."""
    operands = (*(f"multi{i}" for i in range(len(sources))), "dst")
    return build("sum", operands, attributes, dst, len(sources), [float(v) for v in scales], list(sources))

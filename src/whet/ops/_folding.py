"""The budget of constant folding: bytes and operations, proportional to the model's own weights.

Without it a small file could ask for gigabytes of constants (an Expand of a scalar for each layer), or for hours of work at build time.
"""

from __future__ import annotations

from math import prod

from whet.errors import MemoryLimitError, NetworkError
from whet.network import Layer, Network, Tensor
from whet.ops._cost import count_operations

FOLDED_BYTES = 1 << 28  # that any model may fold, in addition to FOLDED_BYTES_PER_BYTE for each byte of its weights
FOLDED_BYTES_PER_BYTE = 16  # a chain of casts, transposes and products per weight
FOLDING_WORK = 1 << 36  # operations of any model, in addition to FOLDING_WORK_PER_BYTE: up to a few minutes
FOLDING_WORK_PER_BYTE = 512
_PER_ELEMENT = 16  # operations that an element of an input or output counts as
_SMALL = 1 << 16  # bytes of a constant that always fits


class FoldBudget:
    """Remaining bytes and operations of constant folding in one model. They are counted, not timed, so that builds are reproducible."""

    def __init__(self, weight_bytes: int):
        self.weight_bytes = weight_bytes
        self.bytes = FOLDED_BYTES + FOLDED_BYTES_PER_BYTE * weight_bytes
        self.work = FOLDING_WORK + FOLDING_WORK_PER_BYTE * weight_bytes

    @classmethod
    def of(cls, net: Network) -> FoldBudget:
        """The budget of a network with the constants that it and its regions have now."""
        return cls(_count_constant_bytes(net))

    def why_not(self, layer: Layer) -> str | None:
        """The reason why a layer with static shapes is not folded; None if it is, and then its operations are spent."""
        added = sum(_count_bytes(t) for t in layer.outputs)
        if added > max(self.bytes, _SMALL):
            limit = f"{FOLDED_BYTES_PER_BYTE} times the model's weights ({self.weight_bytes} bytes) + 256 MiB"
            return f"the constants that passes compute would exceed {limit}"
        work = _work(layer)
        if work > self.work:
            return "computing the model's constants would take too many operations at build time"
        self.work -= work
        return None

    def spend(self, nbytes: int) -> None:
        """Counts a new constant. Raises MemoryLimitError if it exceeds twice the budget: rewrites of weights count, but are not skipped."""
        self.bytes -= nbytes
        if self.bytes < -(FOLDED_BYTES + FOLDED_BYTES_PER_BYTE * self.weight_bytes):
            raise MemoryLimitError(
                f"passes would compute far more constants than the model has weights ({self.weight_bytes} bytes). Build with --passes=none."
            )


def _work(layer: Layer) -> int:
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None]
    moved = _PER_ELEMENT * sum(prod(d for d in t.shape if isinstance(d, int)) for t in tensors)
    try:
        return moved + count_operations(layer)
    except (NetworkError, LookupError, TypeError, ValueError):
        return moved


def _count_constant_bytes(net: Network) -> int:
    regions = (r for layer in net.layers for r in layer.regions.values())
    stored = {id(t.weight): _count_bytes(t) for t in net.constants.values()}  # constants may share a weight
    return sum(stored.values()) + sum(_count_constant_bytes(r) for r in regions)


def _count_bytes(t: Tensor) -> int:
    return t.type.nbytes if isinstance(t.type.nbytes, int) else 0

"""Reports on an engine's sparsity: 2:4 layers with sparse kernels, reasons for dense ones, and unstructured zeros, which save nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from whet.network import Network
from whet.sparsity.guard import TwoFourGuard
from whet.sparsity.two_four import find_reduction_axis, is_two_four, list_eligible_layers

WORTH_A_WORD = 0.2  # reporting threshold: trained weights have no zeros, quantized ones a few per cent


def is_sparse(tactic: str, config: Iterable[tuple[str, int | str]]) -> bool:
    """True for a tactic that computes with 2:4 weights, by its name, and for a config that does, by its field `sparse`."""
    return "sparse" in tactic or bool(dict(config).get("sparse"))


def list_sparse_layers(plan: Any) -> list[str]:
    """Names of an engine plan's layers with a sparse (2:4) tactic."""
    return [n for n, c in plan.choices.items() if is_sparse(c.tactic, c.config)]


def explain_dense_layers(plan: Any) -> str:
    """The reason why eligible layers run dense, with the number of sparse tactics that were timed for them."""
    eligible, picked = list_eligible_layers(plan.network)[0], list_sparse_layers(plan)
    seen = [c for name in eligible if name not in picked for c in plan.report.candidates.get(name, [])]
    sparse = [c for c in seen if is_sparse(c.tactic, c.config) and not c.reason.startswith("computes ")]  # those for other ops say nothing
    timed = [c for c in sparse if c.ms is not None]
    if not sparse:
        return f"no tactic of backend '{plan.backend}' computes these layers with 2:4 weights, so zeros are multiplied like other values"
    if not timed:
        return f"the sparse tactics refused: {sparse[0].reason}"
    return f"{len(timed)} sparse tactics were timed and lost to dense ones (whet explain shows both times)"


def describe_zero_channels(net: Network) -> str | None:
    """A note for models with wholly zero channels; None for other models."""
    zeros = count_zeros(net)
    if not zeros.channels:
        return None
    return (
        f"{zeros.channels} of {zeros.all_channels} input and output channels of weights are wholly zero ({zeros.channel_share:.0%} of the weights). "
        "Builds remove those that are zero in the network's values too (pass remove_zero_channels)."
    )


@dataclass(frozen=True)
class Zeros:
    """Zeros in the weights of convolutions and matrix products: `scattered` is the share (0..1) of unstructured ones, `channels` the number of
    input and output channels that are zero in all of a layer's weights, of `all_channels`; `channel_share` is their share of the weights."""

    scattered: float
    channels: int
    all_channels: int
    channel_share: float


def count_zeros(net: Network) -> Zeros:
    """Counts wholly zero channels as such, input channels too; the other zeros are scattered unless a weight is 2:4."""
    weights = {(*found, "Conv" in (layer.op, layer.composite)) for layer in net.layers if (found := find_reduction_axis(layer)) is not None}
    total = lost = inside = channels = every = 0
    for w, axis, is_conv in weights:
        zero = w.array() == 0
        total += zero.size
        dense = ~zero
        outputs = 0 if is_conv or (zero.ndim == 2 and axis == 1) else zero.ndim - 1
        for i in (outputs, axis):
            if zero.shape[i] == 1:
                continue  # depthwise filters have one input channel each
            empty = ~dense.any(axis=tuple(k for k in range(zero.ndim) if k != i))
            channels += int(empty.sum())
            every += empty.size
            zero[(slice(None),) * i + (empty,)] = False
        removed = zero.size - int(dense.sum()) - int(zero.sum())
        inside += removed
        if not is_two_four(w.array(), axis):
            lost += int(zero.sum())
    return Zeros(lost / total, channels, every, inside / total) if total else Zeros(0.0, 0, 0, 0.0)


def describe_two_four(net: Network) -> str | None:
    """A note for models with 2:4 weights that are built without their kernels; None for other models."""
    count = len(TwoFourGuard(net).nodes)
    return f"{count} layers have 2:4 weights; --sparsity=enable permits the kernels that exploit them." if count else None


def measure_scattered_zeros(net: Network) -> float:
    """Share (0..1) of unstructured zeros in the weights of convolutions and matrix products.

    Excludes 2:4 weights, and channels that are entirely zero.
    """
    return count_zeros(net).scattered


def describe_zeros(net: Network) -> str | None:
    """A note for models with unstructured sparsity; None for other models."""
    share = measure_scattered_zeros(net)
    if share < WORTH_A_WORD:
        return None
    return (
        f"{share:.0%} of the weights are zeros in no pattern (unstructured pruning): no kernel here skips single zeros, so they save neither time "
        "nor memory. docs/claims.md has the measurements, `make demo` repeats them on this machine. Kernels exploit whole channels, heads "
        "and blocks (whet prune)."
    )

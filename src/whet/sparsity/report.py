"""Reports on an engine's sparsity: 2:4 layers with sparse kernels, reasons for dense ones, and unstructured zeros, which save nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Network
from whet.sparsity.two_four import eligible_layers, is_two_four, reduction_axis

WORTH_A_WORD = 0.2  # reporting threshold: trained weights have no zeros, quantized ones a few per cent


def picked_layers(plan: Any) -> list[str]:
    """Names of an engine plan's layers with a sparse (2:4) tactic."""
    return [n for n, c in plan.choices.items() if "sparse" in c.tactic or any(k == "sparse" and v for k, v in c.config)]


def why_dense(plan: Any) -> str:
    """The reason why eligible layers run dense, with the number of timed sparse tactics."""
    eligible, _ = eligible_layers(plan.network)
    seen = [c for name in eligible for c in plan.report.candidates.get(name, [])]
    sparse = [c for c in seen if "sparse" in c.tactic or dict(c.config).get("sparse")]
    timed = [c for c in sparse if c.ms is not None]
    if not sparse:
        return f"no tactic of backend '{plan.backend}' computes with 2:4 weights, so zeros are multiplied like other values"
    if not timed:
        return f"the sparse tactics refused: {sparse[0].reason}"
    return f"{len(timed)} sparse tactics were timed and lost to dense ones (whet explain shows both times)"


def scattered_zeros(net: Network) -> float:
    """Share (0..1) of unstructured zeros in the weights of convolutions and matrix products.

    Excludes 2:4 weights, and filters that are entirely zero (a pass removes those).
    """
    weights = {found for layer in net.layers if (found := reduction_axis(layer)) is not None}
    total = lost = 0
    for w, axis in weights:
        array = w.array()
        total += array.size
        if not is_two_four(array, axis):
            rows = array.reshape(len(array), -1) if axis else np.moveaxis(array, -1, 0).reshape(array.shape[-1], -1)
            empty = int((rows == 0).all(1).sum()) * rows.shape[1]
            lost += array.size - int(np.count_nonzero(array)) - empty
    return lost / total if total else 0.0


def describe_zeros(net: Network) -> str | None:
    """A note for models with unstructured sparsity; None for other models."""
    share = scattered_zeros(net)
    if share < WORTH_A_WORD:
        return None
    return (
        f"{share:.0%} of the weights are zeros in no pattern (unstructured pruning): no kernel here skips single zeros, so they save neither time "
        "nor memory. docs/claims.md has the measurements, `make demo` repeats them on this machine. Kernels exploit whole channels, heads "
        "and blocks (whet prune)."
    )

"""Weights of convolutions that the model standardizes (weight standardization, NFNets): mean and variance of constants, computed at every run.

The standardized weight depends on all of its entries, so its channels could be neither cut nor recovered. It is computed once and stored as a
constant. Training then changes the standardized weight itself.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops import FoldBudget, get_op, run_layer

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_QUANTIZED = ("QuantizeLinear", "DequantizeLinear")


def fold_standardized_weights(net: Network, budget: FoldBudget) -> int:
    """Replaces computed weights whose computation takes statistics of constants, within the budget; returns their number."""
    folded = 0
    for layer in net.layers:
        if layer.op not in _CONVOLUTIONS or layer.needs(1).maker is None:
            continue
        steps = _find_computation(layer.needs(1))
        if steps is None or not any(get_op(s.op).statistics for s in steps) or any(budget.why_not(s) for s in steps):
            continue
        values: dict[Tensor, np.ndarray] = {}
        for step in steps:
            inputs = [None if t is None else t.array() if t.is_constant else values[t] for t in step.inputs]
            values.update(zip(step.outputs, run_layer(step, inputs), strict=True))
        w = layer.needs(1)
        own = net.constant(values[w].astype(w.dtype.numpy), f"{layer.name}.1")
        layer.inputs = tuple(own if k == 1 else t for k, t in enumerate(layer.inputs))
        folded += 1
    if folded:
        net.prune_dead()
    return folded


def _find_computation(end: Tensor) -> list[Layer] | None:
    """The layers that compute `end` in execution order, if they read constants only, of static shapes, and round nothing to integers."""
    steps: dict[Layer, None] = {}

    def visit(t: Tensor) -> bool:
        step = t.maker
        if step is None:
            return t.is_constant
        if step in steps:
            return True
        o = get_op(step.op)
        if step.regions or not o.pure or step.op in _QUANTIZED or not all(isinstance(d, int) for y in step.outputs for d in y.shape):
            return False
        if not step.inputs or not all(visit(x) for x in step.inputs if x is not None):
            return False
        steps[step] = None
        return True

    return list(steps) if visit(end) else None

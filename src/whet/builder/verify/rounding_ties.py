"""The error that rounding ties may cause in a quantized network.

A kernel adds in another order than float64. If that moves a value across a rounding tie, it becomes the adjacent integer, and later layers
see a difference of a whole scale. That is no error of the kernel (an integer at a tie may differ by one), so the tolerance is the network's
own change with every scale a millionth larger and smaller, and with every quantized value larger and smaller by a millionth of the largest
one: the error of a sum is relative to its largest terms, not to a result near zero. Scales of float8 values change by more, to cover the
truncation of tensor cores when they add float8 products (tactics/_error_bounds.py, bound_float8_sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from whet.network import Layer, Network, Tensor, TensorType, Weight
from whet.ops import run_network
from whet.ops.quantize_linear import LARGEST

NUDGE = 2.0**-20
NUDGE8 = 2.0**-9


def has_ties(net: Network) -> bool:
    """True for a network that quantizes activations at run time."""
    return any(x.op == "QuantizeLinear" and not x.needs(0).is_constant for x in net.layers)


def run_with_nudged_scales(
    net: Network, inputs: Mapping[str, np.ndarray], run: Callable[[Network], Mapping[str, np.ndarray]] | None = None
) -> Iterator[list[np.ndarray]]:
    """The outputs in float64 (or of `run`) with the scales of all QuantizeLinear layers nudged up, then down; then with their inputs nudged."""
    for sign, added in ((1, False), (-1, False), (1, True), (-1, True)):
        made = net.clone()
        for layer in list(made.layers):
            if layer.op != "QuantizeLinear" or layer.needs(0).is_constant or layer.needs(1).weight is None:
                continue
            scale = layer.needs(1)
            if added and layer.output.dtype not in LARGEST:
                levels = 2.0**layer.output.dtype.bits * NUDGE * np.asarray(scale.array(), np.float64)
                _add_before(made, layer, sign * levels)
                continue
            factor = 1 + sign * (NUDGE8 if layer.output.dtype in LARGEST else NUDGE)
            moved = Tensor(f"{scale.name} nudged", scale.type, weight=Weight(np.asarray(scale.array(), np.float64) * factor))
            layer.inputs = (layer.inputs[0], moved, *layer.inputs[2:])
        yield list((run(made) if run is not None else run_network(made, inputs, widen=True)).values())


def _add_before(net: Network, layer: Layer, amount: np.ndarray) -> None:
    """Adds `amount` (one value, or one per index of the layer's axis) to the layer's first input."""
    x = layer.needs(0)
    if amount.size > 1:
        axis = int(layer.attrs.get("axis", 1)) % x.type.rank
        if amount.ndim != 1:
            return  # blocked scales
        amount = amount.reshape([-1 if i == axis else 1 for i in range(x.type.rank)])
    else:
        amount = amount.reshape(())
    nudge = Tensor(f"{layer.name} nudge", TensorType(x.dtype, amount.shape), weight=Weight(amount.astype(np.float64)))
    layer.inputs = (net.add("Add", x, nudge, at=net.layers.index(layer)), *layer.inputs[1:])

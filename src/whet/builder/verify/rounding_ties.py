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
            if layer.op != "QuantizeLinear" or layer.needs(0).is_constant:
                continue
            scale, small = layer.needs(1), layer.output.dtype not in LARGEST
            if scale.weight is None and scale.type.elements != 1:
                continue
            if added and small:
                _add_before(made, layer, _scale_by(made, layer, sign * 2.0**layer.output.dtype.bits * NUDGE))
                continue
            moved = _scale_by(made, layer, 1 + sign * (NUDGE if small else NUDGE8))
            layer.inputs = (layer.inputs[0], moved, *layer.inputs[2:])
        yield list((run(made) if run is not None else run_network(made, inputs, widen=True)).values())


def _scale_by(net: Network, layer: Layer, factor: float) -> Tensor:
    """The layer's scale times `factor`: a constant, or of a scale that is computed at run time the output of a new layer."""
    scale = layer.needs(1)
    if scale.weight is not None:
        return Tensor(f"{scale.name} nudged", scale.type, weight=Weight(np.asarray(scale.array(), np.float64) * factor))
    number = Tensor(f"{layer.name} factor", TensorType(scale.dtype, ()), weight=Weight(np.array(factor)))
    return net.add("Mul", scale, number, at=net.layers.index(layer))


def _add_before(net: Network, layer: Layer, amount: Tensor) -> None:
    """Adds `amount` (one value, or one per index of the layer's axis) to the layer's first input."""
    x = layer.needs(0)
    shape: tuple[int, ...] = ()
    if amount.type.elements != 1:
        axis = int(layer.attrs.get("axis", 1)) % x.type.rank
        if amount.type.rank != 1:
            return  # blocked scales
        shape = tuple(-1 if i == axis else 1 for i in range(x.type.rank))
    at = net.layers.index(layer)
    if amount.weight is not None:
        values = amount.array().astype(np.float64).reshape(shape)
        nudge = Tensor(f"{layer.name} nudge", TensorType(x.dtype, values.shape), weight=Weight(values))
    else:
        nudge, at = net.add("Reshape", amount, shape=shape, at=at), at + 1
    layer.inputs = (net.add("Add", x, nudge, at=at), *layer.inputs[1:])

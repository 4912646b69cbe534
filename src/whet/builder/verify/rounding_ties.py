"""The error that rounding ties may cause in a quantized network.

A kernel adds in another order than float64. If that moves a value across a rounding tie, it becomes the adjacent integer, and later layers
see a difference of a whole scale. That is no error of the kernel (an integer at a tie may differ by one), so the tolerance is the network's
own change with every scale a millionth larger and smaller. Scales of float8 values change by more, to cover the truncation of tensor cores
when they add float8 products (tactics/cuda/quantized/_quantized.py, float8_rtol).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from whet.network import Network, Tensor, Weight
from whet.ops import run_network
from whet.ops.quantize_linear import LARGEST

NUDGE = 2.0**-20
NUDGE8 = 2.0**-9


def has_ties(net: Network) -> bool:
    """True for a network that quantizes activations at run time."""
    return any(x.op == "QuantizeLinear" and not x.needs(0).is_constant for x in net.layers)


def nudged_outputs(
    net: Network, inputs: Mapping[str, np.ndarray], run: Callable[[Network], Mapping[str, np.ndarray]] | None = None
) -> Iterator[list[np.ndarray]]:
    """The outputs in float64 (or of `run`) with the scales of all QuantizeLinear layers nudged up, then down."""
    for sign in (1, -1):
        made = net.clone()
        for layer in made.layers:
            if layer.op != "QuantizeLinear" or layer.needs(0).is_constant or layer.needs(1).weight is None:
                continue
            scale = layer.needs(1)
            factor = 1 + sign * (NUDGE8 if layer.output.dtype in LARGEST else NUDGE)
            moved = Tensor(f"{scale.name} nudged", scale.type, weight=Weight(np.asarray(scale.array(), np.float64) * factor))
            layer.inputs = (layer.inputs[0], moved, *layer.inputs[2:])
        yield list((run(made) if run is not None else run_network(made, inputs, widen=True)).values())

"""Parameters and FLOPs of a network, as tables of the literature count them. A FLOP count is no speed: only an engine's time is."""

from __future__ import annotations

from collections.abc import Mapping

from whet.network import Network
from whet.ops._cost import network_operations


def count_params(net: Network) -> int:
    """Elements of all float constants but scalars (bounds, epsilons) and batch-norm statistics (measured, not trained)."""
    statistics = {t for layer in net.layers if layer.op == "BatchNormalization" for t in layer.inputs[3:5]}
    return sum(t.array().size for t in net.constants.values() if t.dtype.is_float and t.type.rank and t not in statistics)


def count_flops(net: Network, env: Mapping[str, int] | None = None) -> int:
    """Floating-point operations of one run, a multiply-add counted as two; symbols default to 1 (one image)."""
    values = {**dict.fromkeys(net.symbols(), 1), **(env or {})}
    return network_operations(net, values)

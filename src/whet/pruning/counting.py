"""Parameters and FLOPs of a network as the literature counts them. A FLOP count does not predict the time of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from whet.network import Layer, Network, Tensor
from whet.ops._cost import count_network_operations

#: Float inputs that configure a layer and are not trained.
_SETTINGS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),  # running statistics, not trained
    "Clip": (1, 2), "DequantizeLinear": (1, 2), "NonMaxSuppression": (3, 4), "OneHot": (2,), "Pad": (2,), "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2), "Resize": (1, 2), "Upsample": (1,),
}  # fmt: skip
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})
_WEIGHTED = frozenset({
    "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "QLinearConv", "RNN", "BatchNormalization", "LayerNormalization",
    "InstanceNormalization", "GroupNormalization", "RMSNormalization", "PRelu",
})  # fmt: skip


def list_trainable_constants(net: Network) -> list[Tensor]:
    """The trainable float constants. Excluded are scalars (bounds, epsilons), layer settings (the scales of a Resize, batch-norm statistics)
    and detector decoding grids: constants that vary along two or more axes and are read only by elementwise layers after the last
    weighted layer."""
    users = net.users()
    behind = _find_layers_before_weights(net)

    def is_grid(reader: Layer, t: Tensor) -> bool:
        wide = sum(d != 1 for d in t.shape) > 1
        return wide and reader.op in _ELEMENTWISE and reader not in behind

    def is_trainable(t: Tensor) -> bool:
        readers = users.get(t, [])
        return not readers or any(i not in _SETTINGS.get(r.op, ()) and not is_grid(r, t) for r, i in readers)

    return [t for t in net.constants.values() if t.dtype.is_float and t.type.rank and is_trainable(t)]


def _find_layers_before_weights(net: Network) -> set[Layer]:
    """The layers that a weighted layer depends on, directly or indirectly."""
    found: set[Layer] = set()
    waiting = [x for x in net.layers if x.op in _WEIGHTED and any(t is not None and t.is_constant for t in x.inputs[1:])]
    while waiting:
        for t in waiting.pop().inputs:
            if t is not None and t.maker is not None and t.maker not in found:
                found.add(t.maker)
                waiting.append(t.maker)
    return found


def count_params(net: Network) -> int:
    """Number of elements of the trainable constants (`list_trainable_constants`)."""
    return sum(t.array().size for t in list_trainable_constants(net))


def count_flops(net: Network, env: Mapping[str, int] | None = None) -> int:
    """Floating-point operations of one run, a multiply-add counts as two; symbols default to 1 (batch 1)."""
    values = {**dict.fromkeys(net.symbols(), 1), **(env or {})}
    return count_network_operations(net, values)

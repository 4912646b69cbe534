"""What elementwise ops of two inputs share: type, coupled axes, arithmetic on known shapes."""

from __future__ import annotations

from collections.abc import Callable

from whet.errors import NetworkError
from whet.network import Dim, Layer, TensorType
from whet.ops._base import Couple, broadcast


def infer_binary(layer: Layer) -> TensorType:
    a, b = layer.inputs[0], layer.inputs[1]
    if a.dtype != b.dtype:  # type: ignore[union-attr]
        raise NetworkError(f"{layer.op} '{layer.name}' takes two tensors of one type, not {a.type} and {b.type}")  # type: ignore[union-attr]
    return TensorType(a.dtype, broadcast(a.shape, b.shape))  # type: ignore[union-attr]


def binary_couples(layer: Layer) -> list[Couple]:
    """Each input axis that is not broadcast is tied to the output's axis at the same place counted from the back."""
    y = layer.output
    made = []
    for x in layer.inputs:
        if x is not None:
            lead = y.type.rank - x.type.rank
            made += [Couple(x, i, y, i + lead) for i, d in enumerate(x.shape) if d == y.shape[i + lead] and d != 1]
    return made


def shape_arithmetic(f: Callable[[Dim, Dim], Dim]):
    """Folds `f` over known shape values, with broadcasting of one element."""

    def shape_value(layer: Layer) -> list[tuple[Dim, ...] | None]:
        a, b = (t.shape_value if t is not None else None for t in layer.inputs)
        if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
            return [None]
        n = max(len(a), len(b))
        return [tuple(f(x, y) for x, y in zip(a * (n // len(a)) if a else a, b * (n // len(b)) if b else b, strict=True))]

    return shape_value

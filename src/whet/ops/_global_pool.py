"""Shared by pooling over all spatial axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops._base import op
from whet.ops._types import require_float_input
from whet.ops._window import pool_couples


def infer(layer: Layer) -> TensorType:
    x = layer.needs(0)
    require_float_input(layer)
    if layer.attrs.get("p", 1) < 1:
        raise NetworkError(f"{layer.op} '{layer.name}': p is {layer.attrs['p']}; it must be at least 1")
    if x.type.rank < 3:
        raise NetworkError(f"{layer.op} '{layer.name}' takes [N, C, *spatial], not {x.type}")
    return x.type.with_shape((*x.shape[:2], *(1,) * (x.type.rank - 2)))


def register_global_pool(name: str, f: Callable[..., Any], attrs: dict[str, Any] | None = None):
    """Registers y = f(x, spatial axes, **attributes), keeping the axes with size 1."""

    def compute_reference(layer, x):
        return f(x, tuple(range(2, x.ndim)), **{k: layer.attrs[k] for k in attrs or {}})

    samples: list[Any] = [
        ([s], {}) for s in ("f32[2,3,7,7]", "f32[1,17,4,5]", "f32[2,5,9]", "f32[1,3,2,3,4]", "extreme f32[2,4,4,4]", "f16[1,3,2,2]")
    ]
    return op(name, infer, compute_reference, attrs=attrs or {}, couples=pool_couples, zeros=(), samples=samples)

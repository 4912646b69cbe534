"""Shared by elementwise ops of one floating-point input: type, samples and coupled axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.ops._base import op
from whet.ops._types import list_same_axis_couples, require_float_input, require_numeric_input

Function = Callable[..., np.ndarray]


def register_unary(
    name: str,
    f: Function,
    *,
    attrs: Mapping[str, Any] | None = None,
    samples: Sequence[Any] = (),
    floats: bool = True,
    infer: Any = None,
    **options: Any,
):
    """Registers y = f(x), or f(x, **attributes); `samples` are attribute sets tested in addition to the defaults."""
    names = tuple(attrs or {})

    def compute_reference(layer, x):
        return f(x, **{k: layer.attrs[k] for k in names})

    shapes = ["f32[2,3,4,5]", "extreme f32[4,16]", "f32[1,17,3]", "f32[]", "f16[3,7]", "f64[5]"]
    return op(
        name,
        infer or (require_float_input if floats else require_numeric_input),
        compute_reference,
        attrs=attrs or {},
        samples=[*(([s], {}) for s in shapes), *((["extreme f32[5,7]"], a) for a in samples)],
        couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
        pointwise=True,
        **options,
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e^x) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))

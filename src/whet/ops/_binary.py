"""Shared by elementwise ops of two inputs: type, coupled axes, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from whet.errors import NetworkError
from whet.network import BOOL, Dim, DType, Layer, TensorType
from whet.ops._base import Couple, find_known_values, op
from whet.ops._types import broadcast, may_span


def infer_binary(layer: Layer) -> TensorType:
    a, b = layer.needs(0), layer.needs(1)
    if a.dtype != b.dtype:
        raise NetworkError(f"{layer.op} '{layer.name}' takes two tensors of one type, not {a.type} and {b.type}")
    return TensorType(a.dtype, broadcast(a.shape, b.shape))


def infer_compare(layer: Layer) -> TensorType:
    return infer_binary(layer).with_dtype(BOOL)


def infer_integers(layer: Layer) -> TensorType:
    dtype = infer_binary(layer)
    if dtype.dtype.kind not in ("int", "uint"):
        raise NetworkError(f"takes integers, not {dtype.dtype}")
    return dtype


def infer_variadic(layer: Layer) -> TensorType:
    """Any number of tensors of one type, broadcast together."""
    dtype, shape = layer.needs(0).dtype, layer.needs(0).shape
    for t in layer.required_inputs():
        if t.dtype != dtype:
            raise NetworkError(f"takes tensors of one type, not {[str(t.type) for t in layer.required_inputs()]}")
        shape = broadcast(shape, t.shape)
    return TensorType(dtype, shape)


def shape_value_by(pick: Callable[[Dim, Dim], Dim]) -> Callable[[Layer], list[tuple[Dim, ...] | None]]:
    """`shape_value` of a variadic op that reduces dims with `pick`; None if an input's values are unknown."""

    def shape_value(layer: Layer) -> list[tuple[Dim, ...] | None]:
        values = [v for t in layer.inputs if (v := find_known_values(t)) is not None]
        if len(values) < len(layer.inputs):
            return [None]
        n = max(len(v) for v in values)
        if any(len(v) not in (1, n) for v in values):
            return [None]
        return [tuple(reduce(pick, row) for row in zip(*(v * (n // len(v)) for v in values), strict=True))]

    return shape_value


def list_binary_couples(layer: Layer) -> list[Couple]:
    """Couples each input axis that is not broadcast to the output's axis at the same position from the back.

    Axes of unknown size are coupled too, since they may equal the output's size at run time.
    """
    y = layer.output
    couples = []
    for x in layer.inputs:
        if x is not None:
            lead = y.type.rank - x.type.rank
            couples += [Couple(x, i, y, i + lead) for i, d in enumerate(x.shape) if may_span(d, y.shape[i + lead])]
    return couples


FLOAT_SAMPLES: tuple[Any, ...] = (
    (["f32[2,3,4,5]", "f32[2,3,4,5]"], {}),
    (["f32[1,16,8,8]", "const f32[16,1,1]"], {}),
    (["const f32[3]", "f32[2,3]"], {}),
    (["f32[2,1,5]", "f32[7,1]"], {}),
    (["extreme f32[4,16]", "extreme f32[4,16]"], {}),
    (["f16[3,7]", "f16[3,7]"], {}),
)
INT_SAMPLES: tuple[Any, ...] = ((["i64[3]", "i64[1]"], {}), (["i32[2,5]", "i32[]"], {}))
BOOL_SAMPLES: tuple[Any, ...] = ((["bool[2,3,4]", "bool[2,3,4]"], {}), (["bool[5,1]", "const bool[3]"], {}), (["bool[]", "bool[]"], {}))


def compare(name: str, f: Callable[[Any, Any], np.ndarray], samples: Sequence[Any] = (*FLOAT_SAMPLES, *INT_SAMPLES)):
    """Registers a comparison with boolean results."""
    return op(name, infer_compare, lambda layer, a, b: f(a, b), samples=samples, couples=list_binary_couples, pointwise=True)


def infer_of_type(dtype: DType) -> Callable[[Layer], TensorType]:
    """infer_binary for inputs that must be of `dtype`."""

    def infer(layer: Layer) -> TensorType:
        got = infer_binary(layer)
        if got.dtype != dtype:
            raise NetworkError(f"takes {dtype}, not {got.dtype}; put a Cast before it")
        return got

    return infer

"""Shared by the passes that recognize normalizations: squares, and factors or shifts of the normalized axes."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import is_scalar, reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def is_square(square: Layer, x: Tensor) -> bool:
    """True if a layer computes x * x or x ** 2."""
    if square.op == "Mul":
        return square.inputs == (x, x)
    return square.op == "Pow" and square.inputs[0] is x and is_scalar(square.inputs[1], 2.0)


def convert_to_norm_parameter(g: Graph, layer: Layer, norm: Layer, value: Tensor, constant: Tensor, name: str) -> Tensor | Skip:
    """The constant operand of `layer` as a parameter of `norm`, whose result `value` is the other operand; `name` is the parameter's in a reason
    to skip it."""
    assert constant.weight is not None
    axis = norm.attrs["axis"] % value.type.rank
    wanted = tuple(value.shape[axis:])
    dims = (1,) * (value.type.rank - constant.type.rank) + tuple(constant.shape)
    if layer.output.type != value.type or any(d != 1 for d in dims[:axis]) or dims[axis:] != wanted:
        return Skip(f"%{constant.name}: {constant.type} is not a {name} of the normalized axes {wanted}")
    if reason := g.escapes(value, layer):
        return Skip(reason)
    weight = reshape_weight(constant.weight, tuple(int(d) for d in wanted))
    return constant if weight is constant.weight else g.constant(weight, constant.name)

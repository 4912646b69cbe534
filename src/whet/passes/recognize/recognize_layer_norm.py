"""(x - mean) / sqrt(variance + epsilon), then scale and shift, becomes LayerNormalization."""

from __future__ import annotations

from whet.network import Layer, Tensor, static_shape
from whet.ops._reduce import list_reduced_axes
from whet.passes.recognize._norms import convert_to_norm_parameter, is_square
from whet.rewrite.constants import is_introduced, make_filled_weight, scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, match_inverse_root
from whet.rewrite.rules import Phase, Skip, rule


@rule("Div", "Mul", "Add", phase=Phase.RECOGNIZE)
def recognize_layer_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    core = _match_normalization(g, layer) if layer.op != "Add" else None
    return core if core is not None or layer.op == "Div" else _match_scale(g, layer)


def _match_normalization(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """The core: centred / sqrt(mean(centred^2) + epsilon), over the last axes, or centred times the reciprocal of the root."""
    for centred, other in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        sub, root = find_maker_of_op(g, centred, "Sub"), match_inverse_root(g, other, inverted=layer.op == "Div")
        add = find_maker_of_op(g, root[0], "Add") if root is not None else None
        if sub is None or root is None or add is None or centred is None:
            continue
        x, mean = sub.inputs[0], find_maker_of_op(g, sub.inputs[1], "ReduceMean")
        variance, epsilon = next(((t, scalar_value(e)) for t, e in (add.inputs, add.inputs[::-1]) if scalar_value(e) is not None), (None, None))
        if x is None or mean is None or variance is None or epsilon is None or mean.inputs[0] is not x:
            continue
        deviation = _match_variance(g, variance, x)
        if deviation is None:
            continue
        axes, rank = list_reduced_axes(mean), x.type.rank
        if not axes or axes != deviation[0] or axes != tuple(range(axes[0], rank)):
            return Skip(f"it normalizes the axes {axes}, not the last ones")
        if not mean.attrs["keepdims"] or variance.shape != mean.output.shape or not x.dtype.is_float:
            return None
        if any(not isinstance(d, int) for d in x.shape[axes[0] :]):
            return Skip(f"the normalized axes of %{x.name}: {x.type} have no fixed size")
        if reason := find_interior_escape(g, layer, list(dict.fromkeys([sub, mean, *deviation[1], add, *root[1]]))):
            return Skip(reason)
        ones = g.constant(make_filled_weight(1.0, static_shape(x.shape[axes[0] :]), x.dtype), "ones")
        return g.add("LayerNormalization", x, ones, axis=axes[0] - rank, epsilon=epsilon)
    return None


def _match_variance(g: Graph, t: Tensor, x: Tensor) -> tuple[tuple[int, ...], list[Layer]] | None:
    """(axes, layers), when `t` is mean((x - mean(x))^2); `x.var()` computes its own mean and may restore the axis by a Reshape."""
    reshape = g.maker(t)
    layers = [reshape] if reshape is not None and reshape.op in ("Reshape", "Unsqueeze") else []
    mean_square = find_maker_of_op(g, reshape.inputs[0] if layers and reshape is not None else t, "ReduceMean")
    square = g.maker(mean_square.inputs[0]) if mean_square is not None else None
    centred = square.inputs[0] if square is not None else None
    sub = find_maker_of_op(g, centred, "Sub")
    mean = find_maker_of_op(g, sub.inputs[1], "ReduceMean") if sub is not None else None
    if mean_square is None or square is None or centred is None or sub is None or mean is None or not is_square(square, centred):
        return None
    if sub.inputs[0] is not x or mean.inputs[0] is not x or not mean.attrs["keepdims"] or list_reduced_axes(mean) != list_reduced_axes(mean_square):
        return None
    return tuple(list_reduced_axes(mean)), [*layers, mean_square, square, sub, mean]


def _match_scale(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A scale or shift of a recognized normalization becomes its scale or bias."""
    for value, other in (layer.inputs, layer.inputs[::-1]):
        norm = find_maker_of_op(g, value, "LayerNormalization")
        if norm is None or value is None or other is None or other.weight is None:
            continue
        x, scale, bias = norm.inputs[0], norm.inputs[1], norm.input(2)
        is_unscaled = is_introduced(scale)
        if bias is not None or (layer.op == "Mul" and not is_unscaled):
            return None  # it has a scale or bias already
        vector = convert_to_norm_parameter(g, layer, norm, value, other, "scale" if layer.op == "Mul" else "shift")
        if isinstance(vector, Skip):
            return vector
        inputs = (x, vector) if layer.op == "Mul" else (x, scale, vector)
        return g.add("LayerNormalization", *inputs, **norm.attrs)
    return None

"""x / sqrt(mean(x^2) + epsilon), over the last axes, becomes RMSNormalization; then a scale becomes its weight.

The root is a divisor, or x is multiplied by its reciprocal: 1 / sqrt, Reciprocal or a power of -1/2.
"""

from __future__ import annotations

from whet.network import Layer, Tensor, static_shape
from whet.ops._reduce import list_reduced_axes
from whet.passes.recognize._norms import convert_to_norm_parameter, is_square
from whet.rewrite.constants import is_introduced, make_filled_weight, scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, match_inverse_root
from whet.rewrite.rules import Phase, Skip, rule


@rule("Div", "Mul", phase=Phase.RECOGNIZE, after=["recognize_layer_norm"])
def recognize_rms_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return _match_core(g, layer) or (_match_scale(g, layer) if layer.op == "Mul" else None)


def _match_core(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, other in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        root = match_inverse_root(g, other, inverted=layer.op == "Div")
        if root is None or x is None:
            continue
        value, interior = root
        add = find_maker_of_op(g, value, "Add")
        if add is None:
            continue
        pairs = (add.inputs, add.inputs[::-1])
        mean, epsilon = next(((find_maker_of_op(g, t, "ReduceMean"), scalar_value(e)) for t, e in pairs if scalar_value(e) is not None), (None, None))
        square = g.maker(mean.inputs[0]) if mean is not None else None
        if mean is None or epsilon is None or square is None or not is_square(square, x):
            continue
        axes, rank = list_reduced_axes(mean), x.type.rank
        if not axes or axes != tuple(range(axes[0], rank)) or not mean.attrs["keepdims"]:
            return Skip(f"it normalizes the axes {axes}, not the last ones")
        if not x.dtype.is_float or x.type != layer.output.type or any(not isinstance(d, int) for d in x.shape[axes[0] :]):
            return Skip(f"the normalized axes of %{x.name}: {x.type} have no fixed size")
        if reason := find_interior_escape(g, layer, [*interior, add, mean, square]):
            return Skip(reason)
        ones = g.constant(make_filled_weight(1.0, static_shape(x.shape[axes[0] :]), x.dtype), "ones")
        return g.add("RMSNormalization", x, ones, axis=axes[0] - rank, epsilon=epsilon)
    return None


def _match_scale(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A constant factor of a recognized normalization becomes its weight."""
    for value, other in (layer.inputs, layer.inputs[::-1]):
        norm = find_maker_of_op(g, value, "RMSNormalization")
        if norm is None or value is None or other is None or other.weight is None:
            continue
        scale = norm.inputs[1]
        if not is_introduced(scale):
            return None  # it has a weight already
        vector = convert_to_norm_parameter(g, layer, norm, value, other, "scale")
        if isinstance(vector, Skip):
            return vector
        return g.add("RMSNormalization", norm.inputs[0], vector, **norm.attrs)
    return None

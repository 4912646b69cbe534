"""An InstanceNormalization of channel groups between two Reshapes, then scale and shift per channel, becomes GroupNormalization.

PyTorch's TorchScript exporter writes torch.nn.GroupNorm so.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import is_introduced, make_filled_weight, reshape_weight, scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", "Mul", "Add", phase=Phase.RECOGNIZE)
def recognize_group_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return _match_groups(g, layer) if layer.op == "Reshape" else _match_parameter(g, layer)


def _match_groups(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """The normalization alone: Reshape(InstanceNormalization(Reshape(x), 1, 0))."""
    norm = find_maker_of_op(g, layer.inputs[0], "InstanceNormalization")
    inner = find_maker_of_op(g, norm.inputs[0], "Reshape") if norm is not None else None
    x = inner.inputs[0] if inner is not None else None
    if norm is None or inner is None or x is None or x.type != layer.output.type or x.type.rank < 3:
        return None
    channels, groups = x.shape[1], norm.needs(0).shape[1]
    if norm.needs(0).shape[0] != x.shape[0] or not isinstance(channels, int) or not isinstance(groups, int) or channels % groups:
        return Skip(f"%{x.name}: {x.type} is normalized as {norm.needs(0).type}, which are no groups of channels")
    if not _has_value(norm.inputs[1], 1) or not _has_value(norm.inputs[2], 0):
        return Skip(f"'{norm.name}' has a scale or bias of its own")
    if reason := find_interior_escape(g, layer, [inner, norm]):
        return Skip(reason)
    ones, zeros = (g.constant(make_filled_weight(v, (channels,), x.dtype), name) for v, name in ((1, "ones"), (0, "zeros")))
    return g.add("GroupNormalization", x, ones, zeros, num_groups=groups, epsilon=norm.attrs["epsilon"])


def _has_value(t: Tensor | None, value: float) -> bool:
    """True if all elements of a constant are `value`."""
    return t is not None and t.weight is not None and bool((t.array() == value).all())


def _match_parameter(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A scale or shift per channel of a recognized normalization becomes its scale or bias."""
    for value, other in (layer.inputs, layer.inputs[::-1]):
        norm = find_maker_of_op(g, value, "GroupNormalization")
        if norm is None or value is None or other is None or other.weight is None:
            continue
        x, scale, bias = norm.inputs
        if not all(map(is_introduced, (bias,) if layer.op == "Add" else (scale, bias))):
            return None  # it has a bias, or a scale and a bias, already
        rank, channels = value.type.rank, value.shape[1]
        dims = (1,) * (rank - other.type.rank) + tuple(other.shape)
        if layer.output.type != value.type or scalar_value(other) is not None or dims != (1, channels, *(1,) * (rank - 2)):
            return Skip(f"%{other.name}: {other.type} is not one value per channel of %{value.name}")
        if reason := g.escapes(value, layer):
            return Skip(reason)
        vector = g.constant(reshape_weight(other.weight, (other.weight.array.size,)), other.name)
        return g.add("GroupNormalization", x, *((vector, bias) if layer.op == "Mul" else (scale, vector)), **norm.attrs)
    return None

"""Moves an activation above Reshapes and Transposes of a convolution's result, so that it can be the convolution's epilogue.

A detector's head is left as it is: one kernel moves and activates its values, and a convolution without epilogue can join that kernel
(fuse_head_convs).
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_ACTIVATIONS = ("Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Relu", "Sigmoid", "Swish", "Tanh")
_MOST_MOVES = 4


@rule(*_ACTIVATIONS, phase=Phase.FOLD, after=["conv_1d_to_2d"])
def lift_activations(g: Graph, layer: Layer) -> Tensor | Skip | None:
    moves: list[Layer] = []
    t = layer.inputs[0]
    while (maker := g.maker(t)) is not None and maker.op in ("Reshape", "Transpose") and len(moves) < _MOST_MOVES:
        if maker.output.type.rank > 4:
            return None  # a detector's head: channels split into anchors; fuse_moves takes its activations too
        moves.append(maker)
        t = maker.inputs[0]
    if t is None or maker is None or maker.op != "Conv" or not moves or any(x is not None and scalar_value(x) is None for x in layer.inputs[1:]):
        return None
    for value, reader in zip((m.output for m in moves), (layer, *moves), strict=False):
        if reason := g.escapes(value, reader):
            return Skip(reason)
    if reason := g.escapes(t, moves[-1]):
        return Skip(reason)
    value = g.add(layer.op, t, *layer.inputs[1:], name=layer.name, sources=layer.sources, **layer.attrs)
    for move in reversed(moves):
        own = {"perm": move.attrs["perm"]} if move.op == "Transpose" else {"shape": move.output.shape}
        if move.op == "Reshape" and (not g.is_sized(move.output.shape) or 0 in move.output.shape):
            return Skip(f"the shape of %{move.output.name}: {move.output.type} is not known")
        value = g.add(move.op, value, **own, name=move.name, sources=move.sources)
    return value

"""A Reshape that only splits axes moves above the Transpose before it, which meets the next Transpose and becomes one with it.

torch.nn.MultiheadAttention transposes [B, S, 3 C] -> [S, B, 3 C], splits it into [S, B, 3, C] and transposes again; and each of q, k and v from
[S, B * H, D] to [B * H, S, D] before it splits [B, H, S, D]. With the splits first, the moves are strides of the projection's own rows.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._axes import group_axes
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes", "split_transposes"])
def split_before_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, y = layer.inputs[0], layer.output
    transpose = find_maker_of_op(g, x, "Transpose")
    if transpose is None or x is None:
        return None
    runs = group_axes(x.shape, y.shape)
    if any(len(xs) != 1 for xs, _ in runs) or not any(sum(y.shape[i] != 1 for i in ys) > 1 for _, ys in runs):
        return None
    if reason := g.escapes(x, layer):
        return Skip(reason)
    if any(d == 0 for d in y.shape) or not g.is_sized(y.shape):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    perm = transpose.attrs["perm"]
    parts = sorted(((perm[xs[0]], ys) for xs, ys in runs), key=lambda run: run[0])  # in the order of the axes before the Transpose
    order = [i for _, ys in parts for i in ys]
    value = g.add("Reshape", transpose.inputs[0], shape=tuple(y.shape[i] for i in order), name=f"{layer.name}_split", sources=layer.sources)
    back = tuple(order.index(i) for i in range(len(order)))
    return g.add("Transpose", value, perm=back, name=transpose.name, sources=transpose.sources)

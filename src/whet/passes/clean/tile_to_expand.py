"""A Tile along axes of one entry becomes an Expand: its readers broadcast or index it. torch.repeat_interleave repeats heads so."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Tile", phase=Phase.CLEAN, after=["fold_shapes"])
def tile_to_expand(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, y, repeats = layer.needs(0), layer.output, layer.attrs.get("repeats")
    if repeats is None or all(r == 1 for r in repeats):
        return None
    if any(r != 1 and d != 1 for r, d in zip(repeats, x.shape, strict=True)):
        return Skip(f"it repeats axes of %{x.name}: {x.type} that have more entries")
    return g.add("Expand", x, shape=tuple(y.shape)) if all(d != 0 for d in y.shape) and g.is_sized(y.shape) else None

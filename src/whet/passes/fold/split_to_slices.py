"""A Split of which a part is taken apart further (rotary position embeddings of a packed projection) becomes a Slice per part.

Each reader can then take its part from the whole tensor: moves and arithmetic in one kernel (fuse_moves), attention by strides. A Split has several
readers and would be a copy.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._strided import RESHAPES
from whet.ops.split import list_part_sizes
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_PARTS = ("Gather", "Slice", "Split")


@rule("Split", phase=Phase.FOLD, level=2)
def split_to_slices(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    if not any(_is_taken_apart(g, t) for t in layer.outputs):
        return None
    x, sizes = layer.needs(0), list_part_sizes(layer)
    if not all(isinstance(n, int) for n in sizes):
        return Skip(f"the sizes of its parts are not known: {sizes}")
    axis, start = layer.attrs["axis"] % x.type.rank, 0
    parts: dict[Tensor, Tensor] = {}
    for t, n in zip(layer.outputs, sizes, strict=True):
        bounds = {"starts": (start,), "ends": (start + n,), "axes": (axis,), "steps": (1,)}
        parts[t] = g.add("Slice", x, name=f"{layer.name}_{len(parts)}", sources=layer.sources, **bounds)
        start += n
    return parts


def _is_taken_apart(g: Graph, t: Tensor) -> bool:
    """True if a reader of `t`, through layers that move its values, takes a part of it, and another reader computes with it."""
    readers = g.readers(t)
    while len(readers) == 1 and readers[0].op in (*RESHAPES, "Transpose"):
        readers = g.readers(readers[0].output)
    parts = [r for r in readers if r.op in _PARTS]
    return bool(parts) and len(parts) < len(readers)

"""An image's channels cut in two, the inner part moved behind the pixels (detectors' heads): one layer, which reads pixels as they lie."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse
from whet.passes._graph import Graph

KIND = "Rearrange"


@rule("Transpose", phase=Phase.FINAL, level=1)
def fuse_rearrange(g: Graph, layer: Layer) -> Tensor | Skip | None:
    reshape = g.maker(layer.inputs[0])
    x = reshape.inputs[0] if reshape is not None and reshape.op == "Reshape" else None
    if reshape is None or x is None or x.is_constant or g.maker(x) is None or x.type.rank not in (4, 5):
        return None
    before, after = tuple(x.shape), tuple(reshape.output.shape)
    if len(after) != len(before) + 1 or after[:1] != before[:1] or after[3:] != before[2:] or layer.attrs["perm"][-1] != 2:
        return None
    if not all(isinstance(d, int) for d in (*after[1:3], before[1])):
        return None
    reason = g.shared(reshape.output, layer)
    return Skip(reason) if reason else fuse(g, KIND, reshape, layer)

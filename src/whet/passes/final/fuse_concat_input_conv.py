"""Two images' channels joined, and the 1x1 convolution that reads them, become one layer: it reads both where they lie, nothing is copied.

Each reader of the joined image takes it in, so all have to be such convolutions: else the copy is made anyway.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole
from whet.passes._graph import Graph

KIND = "ConcatInputConv"


@rule("Conv", "Fused", phase=Phase.FINAL, after=["fuse_conv_pool", "fuse_conv_sum", "fuse_dequantized", "fuse_depthwise_then_pointwise"])
def fuse_concat_input_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    conv = _conv(layer)
    joined = _joined(g, layer) if conv is not None else None
    if conv is None or joined is None or not _small(conv):
        return None
    whole = joined.output
    if g.is_output(whole):
        return Skip(f"%{whole.name} is an output of the network")
    if len(joined.inputs) != 2 or joined.inputs[0] is joined.inputs[1]:
        return Skip(f"'{joined.name}' joins {len(joined.inputs)} parts: the kernels read two")
    if any(t is None or t.is_constant for t in joined.inputs):
        return Skip(f"a part of %{whole.name} is constant")
    for other in g.readers(whole):
        theirs = _conv(other)
        if theirs is None or not _small(theirs) or sum(t is whole for t in other.inputs) > 1:
            return Skip(f"%{whole.name} is also read by '{other.name}', which is no 1x1 convolution")
    return fuse_whole(g, KIND, joined, layer)


def _conv(layer: Layer) -> Layer | None:
    """The convolution that a layer is, or is fused around."""
    if anchored(layer, ("Conv",)) != "Conv":
        return None
    return layer if layer.op == "Conv" else next(x for x in layer.regions["body"].layers if x.op == "Conv")


def _joined(g: Graph, layer: Layer) -> Layer | None:
    """The Concat along channels that makes the layer's image."""
    for t in layer.inputs:
        maker = g.maker(t)
        if maker is not None and maker.op == "Concat" and maker.output.type.rank == 4 and maker.attrs["axis"] % 4 == 1:
            return maker if t is layer.inputs[0] else None
    return None


def _small(conv: Layer) -> bool:
    """1x1 without padding, stride 1, one group."""
    a, w = conv.attrs, conv.inputs[1]
    plain = w is not None and w.type.rank == 4 and w.shape[2:] == (1, 1) and not any(a.get("pads") or ())
    return plain and a["group"] == 1 and set(a.get("strides") or (1,)) == {1}

"""A convolution along one axis becomes one of images of one row, where kernels read whole lines of channels.

The machine's kernels for images then compute it on tensor cores; `lift_activations` moves its activation before the Reshape.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes.clean.transpose_images import transpose_images
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Replacement, Skip, rule


@rule("Conv", "Reshape", "Transpose", phase=Phase.FOLD, after=["fold_batch_norm", "fold_scale_shift", "fold_pads"])
def conv_1d_to_2d(g: Graph, layer: Layer) -> Replacement | Skip | None:
    if g.channel_alignment == 1:
        return None  # kernels for any number of axes
    if layer.op == "Reshape":  # between two of these
        first = find_maker_of_op(g, layer.inputs[0], "Reshape")
        return first.inputs[0] if first is not None and first.needs(0).type == layer.output.type and first.needs(0).type.rank == 4 else None
    if layer.op == "Transpose":  # of such a result, as of any image
        return transpose_images(g, layer)
    x, w, bias = layer.needs(0), layer.needs(1), layer.input(2)
    if x.type.rank != 3:
        return None
    if w.weight is None or not w.dtype.is_float or not g.is_sized((*x.shape, *layer.output.shape)):
        return Skip("its weights are computed at run time or quantized, or its shape depends on data")
    k, c, taps = w.weight.array.shape
    a = layer.attrs
    attrs = {
        "group": a["group"],
        "kernel_shape": (1, taps),
        "strides": (1, *(a.get("strides") or (1,))),
        "dilations": (1, *(a.get("dilations") or (1,))),
    }
    before, after = a.get("pads") or (0, 0)
    image = _to_image(g, x, layer)
    weights = g.constant(reshape_weight(w.weight, (k, c, 1, taps)), w.name)
    inputs = [image, weights] if bias is None else [image, weights, bias]
    y = g.add("Conv", *inputs, **attrs, pads=(0, before, 0, after), name=layer.name, sources=layer.sources)
    return g.add("Reshape", y, shape=layer.output.shape, sources=())


def _to_image(g: Graph, x: Tensor, layer: Layer) -> Tensor:
    """[N, C, L] as [N, C, 1, L]: the image that it was reshaped from, or a Reshape."""
    shape = (x.shape[0], x.shape[1], 1, x.shape[2])
    reshape = find_maker_of_op(g, x, "Reshape")
    if reshape is not None and tuple(reshape.needs(0).shape) == shape:
        return reshape.needs(0)
    return g.add("Reshape", x, shape=shape, name=f"{layer.name}_image", sources=())

"""The norm of each channel over an image, relative to the mean norm of all channels, becomes one layer (ConvNeXt V2's global response normalization).

    ReduceL2 over the pixels, ReduceMean over the channels, Add of a constant, Div

Only the first operation reads an image; the others have a value per channel and would each cost a launch.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body, parse_dims
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.constants import scalar_value
from whet.rewrite.fusing import fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Skip


def make_response_norm_sample(x: str, channel: int) -> Sample:
    """The relative norms of the channels, which are axis `channel`, of images `x`."""
    inputs: list[str | np.ndarray | None] = [x, np.array(1e-6, np.float32)]
    axes = tuple(i for i in range(1, len(parse_dims(x))) if i != channel)

    def build_regions() -> Regions:
        body, (images, epsilon) = make_body(inputs)
        norms = body.add("ReduceL2", images, body.constant(np.array(axes), "pixels"), keepdims=1)
        mean = body.add("ReduceMean", norms, body.constant(np.array([channel]), "channels"), keepdims=1)
        body.mark_output(body.add("Div", norms, body.add("Add", mean, epsilon)))
        return {"body": body}

    return Sample(inputs, {"composite": "ResponseNorm"}, build_regions)


RESPONSE_NORM = register_composite(
    "ResponseNorm",
    title="norms of channels relative to their mean",
    unsupported="no tactic here computes norms of channels and their mean in one layer",
    samples=[
        make_response_norm_sample("f32[2,9,7,48]", 3),
        make_response_norm_sample("f32[1,24,40,16]", 3),
        make_response_norm_sample("f32[3,72,5,6]", 1),
        make_response_norm_sample("f32[1,3,3,3072]", 3),
    ],
)


@RESPONSE_NORM.matcher("Div")
def fuse_response_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """The norm of each channel over an image and its division by the mean of all channels, plus a constant, become one layer."""
    norms, add = find_maker_of_op(g, layer.inputs[0], "ReduceL2"), find_maker_of_op(g, layer.inputs[1], "Add")
    if norms is None or add is None or not layer.output.dtype.is_float:
        return None
    means = [(find_maker_of_op(g, t, "ReduceMean"), other) for t, other in (add.inputs, add.inputs[::-1])]
    mean, epsilon = next(((m, e) for m, e in means if m is not None), (None, None))
    if mean is None or mean.inputs[0] is not norms.output or scalar_value(epsilon) is None:
        return None
    rank, reduced, channel = norms.output.type.rank, list_reduced_axes(norms), list_reduced_axes(mean)
    if not (norms.attrs["keepdims"] and mean.attrs["keepdims"]) or len(channel) != 1 or {0, *reduced, *channel} != set(range(rank)) or 0 in reduced:
        return Skip(f"its norms are over axes {reduced} and their means over {channel}, which are not the pixels and the channels")
    if layer.output.type != norms.output.type or prod(d == 1 for d in (layer.output.shape[i] for i in reduced)) != 1:
        return Skip(f"%{layer.output.name}: {layer.output.type} is not a value per channel")
    if reason := find_interior_escape(g, layer, [norms, mean, add]):
        return Skip(reason)
    return fuse_flat(g, RESPONSE_NORM.kind, norms, mean, add, layer)

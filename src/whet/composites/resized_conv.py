"""An enlarged image, its Concat with another one, and the pointwise convolutions that read it become one layer (detector necks).

Nearest-neighbour resizing picks pixels and a pointwise convolution sums within a pixel, so they commute. Convolving before resizing does the
enlarged image's share of the work on a quarter of the pixels (at twice the size), and neither the enlarged image nor the Concat is stored.
A machine with `fuse_concat_input_conv` has no such Concat left. The convolutions stay fused layers in the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body
from whet.composites.dual_output_conv import DUAL_OUTPUT_CONV
from whet.network import Layer, Network, Tensor, evaluate
from whet.ops import Sample
from whet.ops._cost import count_network_operations
from whet.rewrite.fusing import find_conv_input, find_inner_conv, fuse_nested, is_conv, is_pointwise_conv, list_epilogue_steps, outer_tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_resized_conv_sample(
    images: int, channels: tuple[int, int], filters: tuple[int, ...], small: tuple[int, int], scales: tuple[float, float], *, act: str = "silu",
    last: bool = False, modes: tuple[str, str] = ("asymmetric", "floor"),
) -> Sample:  # fmt: skip
    """act(build_conv(concat(resize(x), z)) + bias) once or twice. `channels` are x's and z's; with `last` the enlarged image is the second input of
    the Concat; `modes` are the Resize's coordinate and nearest mode."""
    c = sum(channels)
    large = tuple(int(np.floor(n * s)) for n, s in zip(small, scales, strict=True))
    shapes = [f"f32[{images},{channels[0]},{small[0]},{small[1]}]", f"f32[{images},{channels[1]},{large[0]},{large[1]}]"]
    constants = [t for k in filters for t in (f"const f32[{k},{c},1,1]", f"const f32[{k}]")]

    def build_conv(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), act)

    def build_regions() -> Regions:
        body, (x, z, *weights) = make_body([*shapes, *constants])
        attrs: dict[str, Any] = {"mode": "nearest", "scales": (1.0, 1.0, *scales)}
        attrs |= {"coordinate_transformation_mode": modes[0], "nearest_mode": modes[1]}
        resized = body.add("Resize", x, **attrs)
        joined = body.add("Concat", *((z, resized) if last else (resized, z)), axis=1)
        if len(filters) == 1:
            body.mark_output(add_fused(body, [joined, *weights], build_conv))
            return {"body": body}
        inner = Network("body", "lowered")
        own, *read = (inner.add_input(f"j{i}", t.type) for i, t in enumerate([joined, *weights]))
        for i in range(2):
            inner.mark_output(add_fused(inner, [own, *read[2 * i : 2 * i + 2]], build_conv))
        for t in body.add("Fused", joined, *weights, composite=DUAL_OUTPUT_CONV.kind, regions={"body": inner}):
            body.mark_output(t)
        return {"body": body}

    return Sample([*shapes, *constants], {"composite": "ResizedConv"}, build_regions)


def _count_operations(layer: Layer, env: Mapping[str, int]) -> int:
    """Operations of the body, less those that convolving the small image instead of the enlarged one saves."""
    resize, _, reader = layer.regions["body"].layers
    small, large = (prod(evaluate(d, env) for d in t.shape) for t in (resize.needs(0), resize.output))
    saved = 2 * sum(evaluate(t.shape[1], env) for t in reader.outputs) * (large - small)
    return count_network_operations(layer.regions["body"], env) - saved


RESIZED_CONV = register_composite(
    "ResizedConv",
    title="convolution of an enlarged image",
    unsupported="no tactic here convolves an image before enlarging it",
    counts_parts=True,
    operations=_count_operations,
    samples=[
        make_resized_conv_sample(1, (16, 32), (16, 32), (4, 5), (2.0, 2.0)),
        make_resized_conv_sample(2, (64, 64), (32, 32), (9, 6), (2.0, 2.0), last=True),
        make_resized_conv_sample(3, (24, 40), (80,), (5, 6), (3.0, 2.0), act="Relu"),
        make_resized_conv_sample(1, (32, 16), (48,), (7, 5), (1.5, 2.4), modes=("half_pixel", "round_prefer_floor")),
        make_resized_conv_sample(2, (128, 96), (96, 96), (20, 20), (2.0, 2.0)),
    ],
)


@RESIZED_CONV.matcher("Conv", "Fused", after=["fuse_dual_output_conv"])
def fuse_resized_conv(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    """An enlarged image, its Concat with another one, and the pointwise convolutions that read it become one layer."""
    joined = _match_input_image(layer)
    concat = g.maker(joined)
    if joined is None or concat is None or concat.op != "Concat" or joined.type.rank != 4 or concat.attrs["axis"] % 4 != 1:
        return None
    resizes = [x for t in concat.inputs if (x := g.maker(t)) is not None and x.op == "Resize"]
    if not resizes:
        return None
    if len(concat.inputs) != 2 or len(resizes) != 1 or any(t is None or t.is_constant for t in concat.inputs):
        return Skip(f"'{concat.name}' does not join exactly one enlarged image and one other")
    (resize,) = resizes
    if resize.attrs["mode"] != "nearest" or resize.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        return Skip(f"'{resize.name}' interpolates or crops, it does not only pick pixels")
    if layer.composite == "Conv" and "add" in list_epilogue_steps(layer):
        return Skip(f"the epilogue of '{layer.name}' adds a residual")
    if not joined.dtype.is_float:
        return Skip(f"%{joined.name} is {joined.dtype}: only floating point is fused")
    for t, reader in ((resize.output, concat), (joined, layer)):
        if reason := g.escapes(t, reader):
            return Skip(reason)
    if (sizes := _find_constant_sizes(resize)) is None:
        return Skip(f"the output size of '{resize.name}' is computed at run time")
    fused = fuse_nested(g, RESIZED_CONV.kind, resize, concat, layer, outputs=layer.outputs, attributes={resize: sizes})
    return dict(zip(layer.outputs, [fused] if isinstance(fused, Tensor) else fused, strict=True))


def _find_constant_sizes(resize: Layer) -> dict[str, tuple[float, ...]] | None:
    """Scales or sizes as attributes; None when they are computed at run time."""
    if any(t is not None and not t.is_constant for t in resize.inputs[1:]):
        return None
    given = {name: t for name, t in (("scales", resize.input(2)), ("sizes", resize.input(3))) if t is not None and t.shape != (0,)}
    return {name: tuple(t.array().reshape(-1).tolist()) for name, t in given.items()}


def _match_input_image(layer: Layer) -> Tensor | None:
    """The image that a pointwise convolution in one group reads, or two convolutions of one image; None for another layer."""
    if layer.composite == DUAL_OUTPUT_CONV.kind:
        convs = layer.regions["body"].layers
        images = {find_conv_input(x) for x in convs if is_conv(x)}
        if len(images) != 1 or len(convs) != 2:  # convolutions of two concatenated images
            return None
        return outer_tensor(layer, images.pop())
    if not is_conv(layer) or not is_pointwise_conv(find_inner_conv(layer)) or find_inner_conv(layer).attrs["group"] != 1:
        return None
    return find_conv_input(layer)

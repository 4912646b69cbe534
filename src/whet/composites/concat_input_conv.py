"""A Concat of two images along channels and the pointwise convolution that reads it become one layer: it reads both images, nothing is copied.

Every reader of the Concat must be such a convolution: else the copy is made anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_inner_conv, fuse_nested, is_conv, is_pointwise_conv
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def concat_input_conv_sample(
    images: int, channels: tuple[int, int], filters: int, h: int, w: int, act: str = "silu", residual: bool = False
) -> Sample:
    """act(build_conv(concat(a, b)) + bias), or act(... + residual)."""
    c = sum(channels)
    inputs = [*(f"f32[{images},{n},{h},{w}]" for n in channels), f"const f32[{filters},{c},1,1]", f"const f32[{filters}]"]
    inputs += [f"f32[{images},{filters},{h},{w}]"] if residual else []

    def build_conv(body: Network, read: list[Tensor]) -> Tensor:
        y = body.add("Conv", *read[:3])
        return activate(body, body.add("Add", y, read[3]) if residual else y, act)

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        body.mark_output(add_fused(body, [body.add("Concat", *own[:2], axis=1), *own[2:]], build_conv))
        return {"body": body}

    return Sample(inputs, {"composite": "ConcatInputConv"}, build_regions)


def make_quantized_concat_sample(
    images: int, channels: tuple[int, int], filters: int, h: int, w: int, read: tuple[str, int], stored: tuple[str, int], act: str = "silu",
    residual: int | None = None,
) -> Sample:  # fmt: skip
    """The same on integers: `read` and `stored` are (type, zero point) of the inputs and the result; `residual` is the zero point of u8
    integers that are added after the activation."""
    c, dtype, rng = sum(channels), read[0], np.random.default_rng(5)
    integers = {"u8": np.uint8, "i8": np.int8}
    inputs: list[Any] = [
        *(f"full {dtype}[{images},{n},{h},{w}]" for n in channels),
        rng.integers(-127, 128, (filters, c, 1, 1)).astype(np.int8),
        rng.standard_normal(filters).astype(np.float32),
        np.asarray(0.02, np.float32),
        np.asarray(read[1], integers[dtype]),
        rng.uniform(0.5, 2, filters).astype(np.float32) * np.float32(0.3 / c),
        np.asarray(0.05, np.float32),
        np.asarray(stored[1], integers[stored[0]]),
    ]
    if residual is not None:
        inputs += [f"full u8[{images},{filters},{h},{w}]", np.asarray(0.03, np.float32), np.asarray(residual, np.uint8)]

    def build_conv(body: Network, own: list[Tensor]) -> Tensor:
        q, weights, bias, scale, zero, scales, out_scale, out_zero, *other = own
        y: Tensor = body.add("Conv", body.add("DequantizeLinear", q, scale, zero), body.add("DequantizeLinear", weights, scales, axis=0), bias)
        y = activate(body, y, act)
        y = body.add("Add", y, body.add("DequantizeLinear", *other)) if other else y
        return body.add("QuantizeLinear", y, out_scale, out_zero)

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        body.mark_output(add_fused(body, [body.add("Concat", *own[:2], axis=1), *own[2:]], build_conv))
        return {"body": body}

    return Sample(inputs, {"composite": "ConcatInputConv"}, build_regions)


CONCAT_INPUT_CONV = register_composite(
    "ConcatInputConv",
    title="convolution of concatenated images",
    unsupported="no tactic here convolves two images without concatenating them first",
    samples=[
        concat_input_conv_sample(1, (16, 32), 48, 6, 7),
        concat_input_conv_sample(2, (64, 64), 64, 9, 9, residual=True),
        concat_input_conv_sample(3, (128, 24), 80, 20, 20, "Relu"),
        concat_input_conv_sample(4, (32, 32), 64, 40, 40),
        make_quantized_concat_sample(1, (16, 32), 48, 6, 7, ("u8", 0), ("u8", 6)),
        make_quantized_concat_sample(2, (64, 64), 64, 9, 9, ("u8", 77), ("i8", -100), residual=100),
        make_quantized_concat_sample(3, (128, 48), 80, 20, 20, ("i8", 0), ("u8", 0), "Relu"),
        make_quantized_concat_sample(4, (32, 32), 64, 40, 40, ("i8", -9), ("u8", 6)),
        make_quantized_concat_sample(2, (256, 128), 128, 10, 10, ("u8", 6), ("u8", 6)),
    ],
)


@CONCAT_INPUT_CONV.matcher("Conv", "Fused", after=["fuse_conv_pool", "fuse_conv_sum", "fuse_dequantized", "fuse_depthwise_then_pointwise"])
def fuse_concat_input_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    concat = _match_channel_concat(g, layer) if _is_single_group_pointwise(layer) else None
    if concat is None:
        return None
    joined = concat.output
    if g.is_output(joined):
        return Skip(f"%{joined.name} is an output of the network")
    if len(concat.inputs) != 2 or concat.inputs[0] is concat.inputs[1]:
        return Skip(f"'{concat.name}' has {len(concat.inputs)} inputs: the kernels read two images")
    if any(t is None or t.is_constant for t in concat.inputs):
        return Skip(f"an input of '{concat.name}' is constant")
    for reader in g.readers(joined):
        if not _is_single_group_pointwise(reader) or sum(t is joined for t in reader.inputs) > 1:
            return Skip(f"%{joined.name} is also read by '{reader.name}', which is no 1x1 convolution")
    return fuse_nested(g, CONCAT_INPUT_CONV.kind, concat, layer)


def _match_channel_concat(g: Graph, layer: Layer) -> Layer | None:
    """The Concat along channels that produces the layer's image."""
    for t in layer.inputs:
        maker = g.maker(t)
        if maker is not None and maker.op == "Concat" and maker.output.type.rank == 4 and maker.attrs["axis"] % 4 == 1:
            return maker if t is layer.inputs[0] else None
    return None


def _is_single_group_pointwise(layer: Layer) -> bool:
    """True if a layer is a pointwise convolution in one group, alone or with an epilogue."""
    return is_conv(layer) and is_pointwise_conv(find_inner_conv(layer)) and find_inner_conv(layer).attrs["group"] == 1

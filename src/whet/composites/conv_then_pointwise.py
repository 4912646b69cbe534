"""A convolution with several taps and the pointwise convolution that reads it become one layer, on floats or on 8-bit integers.

Both stay fused layers in the body.
"""

from __future__ import annotations

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import I8, U8, Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import (
    find_conv_before_pointwise,
    find_conv_weights,
    find_inner_conv,
    fuse_conv_pair,
    fuse_nested,
    is_conv,
    is_pointwise_conv,
    list_epilogue_steps,
    outer_tensor,
)
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_INTEGERS = {"u8": np.uint8, "i8": np.int8}


def make_conv_pointwise_sample(x: str, hidden: int, k: int, *, taps: int = 3, act: str = "Relu", residual: str = "") -> Sample:
    """A bottleneck's end: a convolution to `hidden` channels, `act`, a pointwise convolution to `k` channels with a bias, Relu, and a
    residual added "before" or "after" the Relu."""
    n, c, h, w = parse_dims(x)
    inputs = [x, f"const f32[{hidden},{c},{taps},{taps}]", f"const f32[{hidden}]", f"const f32[{k},{hidden},1,1]", f"const f32[{k}]"]
    inputs += [f"f32[{n},{k},{h},{w}]"] if residual else []

    def build_first(body: Network, read: list[Tensor]) -> Tensor:
        return body.add(act, body.add("Conv", *read, pads=(taps // 2,) * 4))

    def build_last(body: Network, read: list[Tensor]) -> Tensor:
        z = body.add("Conv", *read[:3])
        z = body.add("Add", z, read[3]) if residual == "before" else z
        z = body.add("Relu", z)
        return body.add("Add", z, read[3]) if residual == "after" else z

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        between = add_fused(body, own[:3], build_first)
        body.mark_output(add_fused(body, [between, *own[3:]], build_last))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvThenPointwise"}, build_regions)


def make_quantized_pointwise_sample(
    x: str, hidden: int, k: int, *, taps: int = 3, between: tuple[str, int] = ("u8", 0), act: str = "Relu", residual: str = ""
) -> Sample:
    """The same on integers: `x` as "u8[1,64,14,14]"; `between`: type and zero point of the hidden activations; `residual`: the type of the
    integers that are added before the activation."""
    n, c, h, w = parse_dims(x)
    rng = np.random.default_rng(c + k)
    weights = [rng.integers(-127, 128, s).astype(np.int8) for s in ((hidden, c, taps, taps), (k, hidden, 1, 1))]
    scales = [(rng.uniform(0.5, 2, t.shape[0]) / (90 * t[0].size ** 0.5)).astype(np.float32) for t in weights]
    dtype, zero = between
    steps = [np.float32(0.02), np.float32(0.05), np.float32(0.03), np.float32(0.06)]  # of the input, the hidden values, the residual, the result
    zeros = [np.asarray(v, _INTEGERS[t]) for v, t in ((0, x[:2]), (zero, dtype), (0, residual or "u8"), (3, "u8"))]
    first: list = [f"full {x}", steps[0], zeros[0], weights[0], scales[0], rng.standard_normal(hidden).astype(np.float32), steps[1], zeros[1]]
    last: list = [steps[1], zeros[1], weights[1], scales[1], rng.standard_normal(k).astype(np.float32)]
    last += [f"full {residual}[{n},{k},{h},{w}]", steps[2], zeros[2]] if residual else []
    inputs = [v if isinstance(v, str) else np.asarray(v) for v in (*first, *last, steps[3], zeros[3])]

    def make_conv_builder(taps: int):
        def build(body: Network, read: list[Tensor]) -> Tensor:
            q, step, zero, weights, scales, bias, *more = read
            real = body.add("DequantizeLinear", weights, scales, axis=0)
            y = body.add("Conv", body.add("DequantizeLinear", q, step, zero), real, bias, pads=(taps // 2,) * 4)
            y = body.add("Add", y, body.add("DequantizeLinear", *more[:3])) if len(more) > 2 else y
            return body.add("QuantizeLinear", activate(body, y, act), *more[-2:])

        return build

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        hidden_values = add_fused(body, own[:8], make_conv_builder(taps))
        body.mark_output(add_fused(body, [hidden_values, *own[8:]], make_conv_builder(1)))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvThenPointwise"}, build_regions)


CONV_THEN_POINTWISE = register_composite(
    "ConvThenPointwise",
    title="convolution and pointwise convolution",
    unsupported="no tactic here computes a convolution and the pointwise convolution after it in one kernel",
    counts_parts=True,
    samples=[
        make_conv_pointwise_sample("f32[1,128,14,14]", 128, 512, residual="before"),
        make_conv_pointwise_sample("f32[2,64,9,11]", 64, 128, taps=5, act="HardSwish"),
        make_conv_pointwise_sample("f32[1,32,7,7]", 128, 256, residual="after"),
        make_conv_pointwise_sample("f32[1,64,56,56]", 64, 256),
        make_quantized_pointwise_sample("u8[1,256,14,14]", 256, 1024, residual="u8"),
        make_quantized_pointwise_sample("u8[2,64,9,11]", 64, 128, taps=5),
        make_quantized_pointwise_sample("i8[1,128,7,7]", 128, 256, between=("i8", -100), act="silu", residual="i8"),
        make_quantized_pointwise_sample("u8[1,64,56,56]", 64, 256, residual="i8"),
    ],
)


def _has_taps(conv: Layer) -> bool:
    """True if a Conv has several taps, stride 1, no dilation and one group."""
    w, a = find_conv_weights(conv), conv.attrs
    if w is None or w.shape[2:] == (1, 1):
        return False
    return {*(a.get("strides") or (1,)), *(a.get("dilations") or (1,))} == {1} and a["group"] == 1


@CONV_THEN_POINTWISE.matcher("*", after=["fuse_conv_sum", "fuse_depthwise_then_pointwise"])
def fuse_conv_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A convolution with several taps and the pointwise convolution that reads it become one layer."""
    pair = find_conv_before_pointwise(g, layer)
    if pair is None or not _has_taps(find_inner_conv(pair[0])):
        return None
    first, value = pair
    return fuse_conv_pair(g, CONV_THEN_POINTWISE.kind, first, value, layer)


@CONV_THEN_POINTWISE.matcher("*", after=["fuse_conv_then_pointwise", "fuse_quantized_pool", "fuse_quantized_sum"])
def fuse_quantized_conv_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A quantized convolution with several taps and the quantized pointwise convolution that reads it become one layer."""
    value = _find_quantized_input(layer)
    first = g.maker(value)
    if value is None or first is None or _find_quantized_input(first) is None or not is_pointwise_conv(find_inner_conv(layer)):
        return None
    if value.dtype not in (I8, U8) or not _has_taps(find_inner_conv(first)) or find_inner_conv(layer).attrs["group"] != 1:
        return None
    if "add" in list_epilogue_steps(first):
        return Skip(f"the epilogue of '{first.name}' adds a residual")
    if reason := g.escapes(value, layer):
        return Skip(reason)
    return fuse_nested(g, CONV_THEN_POINTWISE.kind, first, layer)


def _find_quantized_input(layer: Layer) -> Tensor | None:
    """The integers that a quantized convolution reads; None for another layer."""
    if layer.op != "Fused" or not is_conv(layer):
        return None
    x = find_inner_conv(layer).inputs[0]
    dequantize = None if x is None else x.maker
    if dequantize is None or dequantize.op != "DequantizeLinear":
        return None
    return outer_tensor(layer, dequantize.inputs[0])

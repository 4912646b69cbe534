"""Samples of fused layers around more than one op: sums of two convolutions, global pooling with a product behind it, first
convolutions with pooling, depthwise convolutions with products behind them, convolutions with SiLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Network, parse_type
from whet.ops._base import Sample


def conv_sum(x: str, w: str, z: str, v: str, **attrs: dict[str, Any]) -> Sample:
    """relu(conv(x, w) + (conv(z, v) + bias)), as a residual block ends; `attrs` are those of the convolutions, by name "first" and "second".

    The second convolution takes the sum and the activation, as fuse_conv_add and fuse_conv_activation leave it.
    """
    k = w.split("[")[1].split(",")[0]
    inputs = [x, f"const {w}", z, f"const {v}", f"const f32[{k}]"]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(n, parse_type(t.split()[-1])) for n, t in zip("xwzvb", inputs, strict=True)]
        first = body.add("Conv", *own[:2], **attrs.get("first", {}))
        inner = Network("body", "lowered")
        read = [inner.add_input(n, t.type) for n, t in zip(("z", "v", "b", "first"), (*own[2:], first), strict=True)]
        second = inner.add("Conv", *read[:3], **attrs.get("second", {}))
        inner.mark_output(inner.add("Relu", inner.add("Add", second, read[3])))
        body.mark_output(body.add("Fused", *own[2:], first, composite="Conv", regions={"body": inner}))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvSum"}, regions)


def pool_gemm(x: str, columns: int, bias: bool = True) -> Sample:
    """Means over the image and a product, as a classifier ends."""
    c = int(x.split(",")[1])
    inputs = [x, f"const f32[{columns},{c}]", *([f"const f32[{columns}]"] if bias else [])]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(n, parse_type(t.split()[-1])) for n, t in zip("xwb", inputs, strict=False)]
        means = body.add("Flatten", body.add("GlobalAveragePool", own[0]), axis=1)
        body.mark_output(body.add("Gemm", means, *own[1:], transB=1))
        return {"body": body}

    return Sample(inputs, {"composite": "PoolGemm"}, regions)


def conv_pool(x: str, w: str, window: int, stride: int, pad: int, relu: bool, **attrs: Any) -> Sample:
    """A first convolution with a bias, and max pooling."""
    k = w.split("[")[1].split(",")[0]
    inputs = [x, f"const {w}", f"const f32[{k}]"]

    def regions() -> dict[str, Network]:
        body, inner = Network("body", "lowered"), Network("body", "lowered")
        own = [body.add_input(n, parse_type(t.split()[-1])) for n, t in zip("xwb", inputs, strict=True)]
        read = [inner.add_input(t.name, t.type) for t in own]
        y = inner.add("Conv", *read, **attrs)
        inner.mark_output(inner.add("Relu", y) if relu else y)
        made = body.add("Fused", *own, composite="Conv", regions={"body": inner})
        body.mark_output(body.add("MaxPool", made, kernel_shape=(window,) * 2, strides=(stride,) * 2, pads=(pad,) * 4))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvPool"}, regions)


def quantized_image(x: str, w: str, pool: tuple[int, int, int] | None = None, **attrs: Any) -> Sample:
    """A first convolution on integers, from the float image that is quantized to u8 numbers; pooled by `pool` (window, stride, padding)."""
    k = int(w.split("[")[1].split(",")[0])
    numbers = [np.asarray(v) for v in (np.float32(0.02), np.int8(5), np.full(k, 0.004, np.float32), np.float32(0.05), np.uint8(3))]
    inputs = [x, numbers[0], numbers[1], f"const {w}", *numbers[2:]]

    def regions() -> dict[str, Network]:
        body, inner = Network("body", "lowered"), Network("body", "lowered")
        kinds = [x, "f32[]", "i8[]", w, f"f32[{k}]", "f32[]", "u8[]"]
        image, *own = [body.add_input(f"i{i}", parse_type(t)) for i, t in enumerate(kinds)]
        integers = body.add("QuantizeLinear", image, *own[:2])
        read, s, z, weights, scales, t, o = [inner.add_input(v.name, v.type) for v in (integers, *own)]
        real = inner.add("DequantizeLinear", weights, scales, axis=0)
        y = inner.add("Relu", inner.add("Conv", inner.add("DequantizeLinear", read, s, z), real, **attrs))
        inner.mark_output(inner.add("QuantizeLinear", y, t, o))
        made = body.add("Fused", integers, *own, composite="Conv", regions={"body": inner})
        if pool is not None:
            made = body.add("MaxPool", made, kernel_shape=pool[:1] * 2, strides=pool[1:2] * 2, pads=pool[2:] * 4)
        body.mark_output(made)
        return {"body": body}

    return Sample(inputs, {"composite": "ConvPool" if pool else "QuantizeThenConv"}, regions)


def depthwise_product(x: str, k: int, stride: int, *, taps: int = 3, clip: bool = True, residual: bool = False) -> Sample:
    """An inverted residual's end: a depthwise convolution, a clip, a 1x1 convolution with a bias, what is added to it."""
    n, c, h, w = (int(v) for v in x[4:-1].split(","))
    size, pad = [(v - 1) // stride + 1 for v in (h, w)], taps // 2
    inputs = [x, f"const f32[{c},1,{taps},{taps}]", f"const f32[{c}]", f"const f32[{k},{c},1,1]", f"const f32[{k}]"]
    inputs += [f"f32[{n},{k},{size[0]},{size[1]}]"] if residual else []

    def regions() -> dict[str, Network]:
        body, first, last = (Network("body", "lowered") for _ in range(3))
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        y = first.add("Conv", *[first.add_input(t.name, t.type) for t in own[:3]], group=c, strides=(stride,) * 2, pads=(pad,) * 4)
        first.mark_output(first.add("HardSwish" if not clip else "Relu", y))
        between = body.add("Fused", *own[:3], composite="Conv", regions={"body": first})
        z = last.add("Conv", last.add_input("between", between.type), *[last.add_input(t.name, t.type) for t in own[3:5]])
        if residual:
            z = last.add("Add", z, last.add_input("other", own[5].type))
        last.mark_output(z if residual else last.add("Relu", z))
        body.mark_output(body.add("Fused", between, *own[3:], composite="Conv", regions={"body": last}))
        return {"body": body}

    return Sample(inputs, {"composite": "DepthwiseThenPointwise"}, regions)


def conv_silu(x: str, w: str, bias: bool = True, before: str = "", behind: str = "", **attrs: Any) -> Sample:
    """x * sigmoid(x) of a convolution; `before` and `behind`: type of what is added to the sums before and after that."""
    inputs = [x, f"const {w}", *([f"const f32[{w.split('[')[1].split(',')[0]}]"] if bias else [])]
    own = len(inputs)
    inputs += [added for added in (before, behind) if added]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        read = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        y = body.add("Conv", *read[:own], **attrs)
        y = body.add("Add", y, read[own]) if before else y
        y = body.add("Mul", y, body.add("Sigmoid", y))
        body.mark_output(body.add("Add", y, read[-1]) if behind else y)
        return {"body": body}

    return Sample(inputs, {"composite": "Conv"}, regions)


STEM = {"strides": (2, 2), "pads": (3, 3, 3, 3)}
SAMPLES = [
    depthwise_product("f32[1,96,14,14]", 24, 1, residual=True),
    depthwise_product("f32[2,144,28,27]", 32, 2),
    depthwise_product("f32[1,960,7,7]", 160, 1),
    depthwise_product("f32[1,40,9,11]", 16, 1, taps=5, clip=False),
    depthwise_product("f32[3,32,56,56]", 16, 1),
    depthwise_product("f32[40,64,28,28]", 96, 1, residual=True),
    conv_pool("f32[2,3,61,53]", "f32[64,3,7,7]", 3, 2, 1, relu=True, **STEM),
    conv_pool("f32[1,3,40,40]", "f32[64,3,7,7]", 3, 2, 1, relu=False, **STEM),
    conv_pool("f32[2,3,40,224]", "f32[64,3,7,7]", 3, 2, 1, relu=True, **STEM),
    conv_pool("f32[1,2,36,72]", "f32[56,2,5,5]", 3, 2, 1, relu=False, strides=(2, 2), pads=(2, 2, 2, 2)),
    conv_pool("f32[3,1,24,40]", "f32[64,1,3,3]", 3, 2, 1, relu=True, strides=(2, 2), pads=(1, 1, 1, 1)),
    conv_pool("f32[1,1,37,30]", "f32[56,1,3,3]", 2, 2, 0, relu=False, pads=(1, 1, 1, 1)),
    pool_gemm("f32[1,512,7,7]", 100),
    pool_gemm("f32[3,1280,7,7]", 1000),
    pool_gemm("f32[4,40,5,4]", 10, bias=False),
    pool_gemm("f32[1,2048,7,7]", 130),
    conv_sum("f32[1,16,8,8]", "f32[32,16,1,1]", "f32[1,24,8,8]", "f32[32,24,1,1]"),
    conv_sum("f32[2,64,9,9]", "f32[64,64,3,3]", "f32[2,128,17,17]", "f32[64,128,1,1]", first={"pads": (1, 1, 1, 1)}, second={"strides": (2, 2)}),
    conv_sum("f32[1,256,14,14]", "f32[128,256,1,1]", "f32[1,128,28,28]", "f32[128,128,1,1]", second={"strides": (2, 2)}),
    conv_sum(
        "f32[1,32,16,16]",
        "f32[48,32,1,1]",
        "f32[1,16,16,16]",
        "f32[48,16,3,3]",
        first={"strides": (2, 2)},
        second={"strides": (2, 2), "pads": (1, 1, 1, 1)},
    ),
    conv_sum("f32[7,64,24,24]", "f32[128,64,1,1]", "f32[7,64,24,24]", "f32[128,64,1,1]"),
    quantized_image("f32[2,3,45,39]", "i8[64,3,7,7]", (3, 2, 1), **STEM),
    quantized_image("f32[2,3,45,39]", "i8[40,3,3,3]", strides=(2, 2), pads=(1, 1, 1, 1)),
    quantized_image("f32[2,3,44,48]", "i8[64,3,7,7]", (3, 2, 1), **STEM),
    quantized_image("f32[1,3,28,40]", "i8[32,3,6,6]", strides=(2, 2), pads=(2, 2, 2, 2)),
    conv_silu("f32[1,24,9,7]", "f32[144,24,1,1]"),
    conv_silu("f32[2,16,5,6]", "f32[64,16,1,1]", bias=False),
    conv_silu("f32[1,32,11,15]", "f32[32,1,3,3]", group=32, pads=(1, 1, 1, 1)),
    conv_silu("f32[2,16,14,13]", "f32[16,1,5,5]", bias=False, group=16, pads=(2, 2, 2, 2), strides=(2, 2)),
    conv_silu("f32[2,20,9,11]", "f32[40,20,3,3]", pads=(1, 1, 1, 1), behind="f32[2,40,9,11]"),
    conv_silu("f32[1,3,18,26]", "f32[16,3,6,6]", pads=(2, 2, 2, 2), strides=(2, 2)),
]

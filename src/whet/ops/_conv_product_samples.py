"""Samples of convolutions with 1x1 convolutions behind or in front of them, as bottlenecks have them; in floating point and on integers."""

from __future__ import annotations

import numpy as np

from whet.network import Network, Tensor, parse_type
from whet.ops._base import Sample

_INTEGERS = {"u8": np.uint8, "i8": np.int8}


def conv_product(x: str, inner: int, k: int, *, taps: int = 3, hard: bool = False, residual: str = "") -> Sample:
    """A bottleneck's end: a convolution, an activation, a 1x1 convolution with a bias, what is added "before" or "after" its activation."""
    n, c, h, w = (int(v) for v in x[4:-1].split(","))
    inputs = [x, f"const f32[{inner},{c},{taps},{taps}]", f"const f32[{inner}]", f"const f32[{k},{inner},1,1]", f"const f32[{k}]"]
    inputs += [f"f32[{n},{k},{h},{w}]"] if residual else []

    def regions() -> dict[str, Network]:
        body, first, last = (Network("body", "lowered") for _ in range(3))
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        y = first.add("Conv", *[first.add_input(t.name, t.type) for t in own[:3]], pads=(taps // 2,) * 4)
        first.mark_output(first.add("HardSwish" if hard else "Relu", y))
        between = body.add("Fused", *own[:3], composite="Conv", regions={"body": first})
        z = last.add("Conv", last.add_input("between", between.type), *[last.add_input(t.name, t.type) for t in own[3:5]])
        other = last.add_input("other", own[5].type) if residual else None
        z = last.add("Add", z, other) if residual == "before" else z
        z = last.add("Relu", z)
        last.mark_output(last.add("Add", z, other) if residual == "after" else z)
        body.mark_output(body.add("Fused", between, *own[3:], composite="Conv", regions={"body": last}))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvThenPointwise"}, regions)


def product_conv(x: str, k: int, *, taps: int = 3, stride: int = 1, silu: bool = True, residual: bool = False) -> Sample:
    """A 1x1 convolution of as many channels, an activation, a convolution, an activation, and the input added behind it."""
    c = int(x.split(",")[1])
    inputs = [x, f"const f32[{c},{c},1,1]", f"const f32[{c}]", f"const f32[{k},{c},{taps},{taps}]", f"const f32[{k}]"]

    def activated(net: Network, y: Tensor) -> Tensor:
        return net.add("Mul", y, net.add("Sigmoid", y)) if silu else net.add("Relu", y)

    def regions() -> dict[str, Network]:
        body, first, last = (Network("body", "lowered") for _ in range(3))
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        first.mark_output(activated(first, first.add("Conv", *[first.add_input(t.name, t.type) for t in own[:3]])))
        between = body.add("Fused", *own[:3], composite="Conv", regions={"body": first})
        read = [last.add_input(t.name, t.type) for t in (between, *own[3:], *own[: int(residual)])]
        y = activated(last, last.add("Conv", *read[:3], pads=(taps // 2,) * 4, strides=(stride,) * 2))
        last.mark_output(last.add("Add", y, read[3]) if residual else y)
        body.mark_output(body.add("Fused", between, *own[3:], *own[: int(residual)], composite="Conv", regions={"body": last}))
        return {"body": body}

    return Sample(inputs, {"composite": "PointwiseThenConv"}, regions)


def quantized_product(
    x: str, inner: int, k: int, *, taps: int = 3, middle: tuple[str, int] = ("u8", 0), silu: bool = False, residual: str = ""
) -> Sample:
    """The same on integers: `x` as "u8[1,64,14,14]", between the two those of `middle` (type, zero point), `residual` the type of what is added."""
    n, c, h, w = (int(v) for v in x[3:-1].split(","))
    rng = np.random.default_rng(c + k)
    tables = [rng.integers(-127, 128, s).astype(np.int8) for s in ((inner, c, taps, taps), (k, inner, 1, 1))]
    scales = [(rng.uniform(0.5, 2, t.shape[0]) / (90 * t[0].size ** 0.5)).astype(np.float32) for t in tables]
    kind, zero = middle
    steps = [np.float32(0.02), np.float32(0.05), np.float32(0.03), np.float32(0.06)]  # of the input, the middle, the residual, the result
    zeros = [np.asarray(v, _INTEGERS[t]) for v, t in ((0, x[:2]), (zero, kind), (0, residual or "u8"), (3, "u8"))]
    first: list = [f"full {x}", steps[0], zeros[0], tables[0], scales[0], rng.standard_normal(inner).astype(np.float32), steps[1], zeros[1]]
    last: list = [steps[1], zeros[1], tables[1], scales[1], rng.standard_normal(k).astype(np.float32)]
    last += [f"full {residual}[{n},{k},{h},{w}]", steps[2], zeros[2]] if residual else []
    inputs = [v if isinstance(v, str) else np.asarray(v) for v in (*first, *last, steps[3], zeros[3])]

    def body_of(own: list[Tensor], taps: int) -> Network:
        body = Network("body", "lowered")
        x, s, z, weights, scales, bias, *more = (body.add_input(t.name, t.type) for t in own)
        real = body.add("DequantizeLinear", weights, scales, axis=0)
        y = body.add("Conv", body.add("DequantizeLinear", x, s, z), real, bias, pads=(taps // 2,) * 4)
        y = body.add("Add", y, body.add("DequantizeLinear", *more[:3])) if len(more) > 2 else y
        y = body.add("Mul", y, body.add("Sigmoid", y)) if silu else body.add("Relu", y)
        body.mark_output(body.add("QuantizeLinear", y, *more[-2:]))
        return body

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(v.split()[-1] if isinstance(v, str) else _type_of(v))) for i, v in enumerate(inputs)]
        between = body.add("Fused", *own[:8], composite="Conv", regions={"body": body_of(own[:8], taps)})
        rest = [between, *own[8:]]
        body.mark_output(body.add("Fused", *rest, composite="Conv", regions={"body": body_of(rest, 1)}))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvThenPointwise"}, regions)


def _type_of(v: np.ndarray) -> str:
    name = next((k for k, kind in _INTEGERS.items() if v.dtype == kind), "f32")
    return f"{name}[{','.join(map(str, v.shape))}]"


SAMPLES = [
    conv_product("f32[1,128,14,14]", 128, 512, residual="before"),
    conv_product("f32[2,64,9,11]", 64, 128, taps=5, hard=True),
    conv_product("f32[1,32,7,7]", 128, 256, residual="after"),
    conv_product("f32[1,64,56,56]", 64, 256),
    product_conv("f32[2,32,18,20]", 32, residual=True),
    product_conv("f32[1,64,11,13]", 40, stride=2),
    product_conv("f32[1,16,17,36]", 16, taps=5, silu=False, residual=True),
    quantized_product("u8[1,256,14,14]", 256, 1024, residual="u8"),
    quantized_product("u8[2,64,9,11]", 64, 128, taps=5),
    quantized_product("i8[1,128,7,7]", 128, 256, middle=("i8", -100), silu=True, residual="i8"),
    quantized_product("u8[1,64,56,56]", 64, 256, residual="i8"),
]

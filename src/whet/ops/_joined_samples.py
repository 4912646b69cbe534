"""Samples of 1x1 convolutions that read two images' joined channels, in floats and on integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Network, Tensor, parse_type
from whet.ops._base import Sample


def joined(images: int, channels: tuple[int, int], filters: int, h: int, w: int, act: str = "silu", residual: bool = False) -> Sample:
    """act(conv(join(a, b)) + bias), or act(... + residual)."""
    c = sum(channels)
    inputs = [*(f"f32[{images},{n},{h},{w}]" for n in channels), f"const f32[{filters},{c},1,1]", f"const f32[{filters}]"]
    inputs += [f"f32[{images},{filters},{h},{w}]"] if residual else []

    def regions() -> dict[str, Network]:
        body, inner = Network("body", "lowered"), Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        fed = [body.add("Concat", *own[:2], axis=1), *own[2:]]
        read = [inner.add_input(f"r{i}", t.type) for i, t in enumerate(fed)]
        y = inner.add("Conv", *read[:3])
        y = inner.add("Add", y, read[3]) if residual else y
        inner.mark_output(_activated(inner, y, act))
        body.mark_output(body.add("Fused", *fed, composite="Conv", regions={"body": inner}))
        return {"body": body}

    return Sample(inputs, {"composite": "ConcatInputConv"}, regions)


def joined_integers(
    images: int, channels: tuple[int, int], filters: int, h: int, w: int, read: tuple[str, int], stored: tuple[str, int], act: str = "silu",
    residual: int | None = None,
) -> Sample:  # fmt: skip
    """The same on integers of type and zero point `read`, stored as `stored`; `residual` is the zero point of the u8 numbers that are added behind
    the activation."""
    c, kind, rng = sum(channels), read[0], np.random.default_rng(5)
    shapes = [f"full {kind}[{images},{n},{h},{w}]" for n in channels]
    numbers = {"u8": np.uint8, "i8": np.int8}
    values: list[Any] = [
        rng.integers(-127, 128, (filters, c, 1, 1)).astype(np.int8),
        rng.standard_normal(filters).astype(np.float32),
        np.asarray(0.02, np.float32),
        np.asarray(read[1], numbers[kind]),
        rng.uniform(0.5, 2, filters).astype(np.float32) * np.float32(0.3 / c),
        np.asarray(0.05, np.float32),
        np.asarray(stored[1], numbers[stored[0]]),
    ]
    more: list[Any] = []
    if residual is not None:
        more = [f"full u8[{images},{filters},{h},{w}]", np.asarray(0.03, np.float32), np.asarray(residual, np.uint8)]

    def kind_of(x: Any) -> str:
        names = {"float32": "f32", "int8": "i8", "uint8": "u8"}
        return x.split()[-1] if isinstance(x, str) else f"{names[x.dtype.name]}[{','.join(map(str, x.shape))}]"

    def regions() -> dict[str, Network]:
        body, inner = Network("body", "lowered"), Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(kind_of(t))) for i, t in enumerate([*shapes, *values, *more])]
        fed = [body.add("Concat", *own[:2], axis=1), *own[2:]]
        x, wt, b, s, z, scales, t, o, *other = [inner.add_input(f"r{i}", v.type) for i, v in enumerate(fed)]
        y: Tensor = inner.add("Conv", inner.add("DequantizeLinear", x, s, z), inner.add("DequantizeLinear", wt, scales, axis=0), b)
        y = _activated(inner, y, act)
        y = inner.add("Add", y, inner.add("DequantizeLinear", *other)) if other else y
        inner.mark_output(inner.add("QuantizeLinear", y, t, o))
        body.mark_output(body.add("Fused", *fed, composite="Conv", regions={"body": inner}))
        return {"body": body}

    return Sample([*shapes, *values, *more], {"composite": "ConcatInputConv"}, regions)


def _activated(body: Network, y: Tensor, act: str) -> Tensor:
    return body.add("Mul", y, body.add("Sigmoid", y)) if act == "silu" else body.add(act, y)


SAMPLES = [
    joined(1, (16, 32), 48, 6, 7),
    joined(2, (64, 64), 64, 9, 9, residual=True),
    joined(3, (128, 24), 80, 20, 20, "Relu"),
    joined(4, (32, 32), 64, 40, 40),
    joined_integers(1, (16, 32), 48, 6, 7, ("u8", 0), ("u8", 6)),
    joined_integers(2, (64, 64), 64, 9, 9, ("u8", 77), ("i8", -100), residual=100),
    joined_integers(3, (128, 48), 80, 20, 20, ("i8", 0), ("u8", 0), "Relu"),
    joined_integers(4, (32, 32), 64, 40, 40, ("i8", -9), ("u8", 6)),
    joined_integers(2, (256, 128), 128, 10, 10, ("u8", 6), ("u8", 6)),
]

"""Samples of 1x1 convolutions, one or two, that read an enlarged image joined to another one."""

from __future__ import annotations

import numpy as np

from whet.network import Network, Tensor, parse_type
from whet.ops._base import Sample


def resized(
    images: int, channels: tuple[int, int], filters: tuple[int, ...], small: tuple[int, int], scales: tuple[float, float], *, act: str = "silu",
    last: bool = False, how: tuple[str, str] = ("asymmetric", "floor"),
) -> Sample:  # fmt: skip
    """act(conv(join(resize(x), z)) + bias) once or twice; `channels` are x's and z's, `last`: the enlarged one stands behind; `how` picks pixels."""
    c = sum(channels)
    large = tuple(int(np.floor(n * s)) for n, s in zip(small, scales, strict=True))
    shapes = [f"f32[{images},{channels[0]},{small[0]},{small[1]}]", f"f32[{images},{channels[1]},{large[0]},{large[1]}]"]
    constants = [t for k in filters for t in (f"const f32[{k},{c},1,1]", f"const f32[{k}]")]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        x, z, *weights = (body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate([*shapes, *constants]))
        attrs = {"mode": "nearest", "coordinate_transformation_mode": how[0], "nearest_mode": how[1], "scales": (1.0, 1.0, *scales)}
        resized = body.add("Resize", x, **attrs)
        joined = body.add("Concat", *((z, resized) if last else (resized, z)), axis=1)
        if len(filters) == 1:
            body.mark_output(_conv(body, joined, weights, act))
            return {"body": body}
        inner = Network("body", "lowered")
        own, *fed = (inner.add_input(f"j{i}", t.type) for i, t in enumerate([joined, *weights]))
        for i in range(2):
            inner.mark_output(_conv(inner, own, fed[2 * i : 2 * i + 2], act))
        for t in body.add("Fused", joined, *weights, composite="DualOutputConv", regions={"body": inner}):
            body.mark_output(t)
        return {"body": body}

    return Sample([*shapes, *constants], {"composite": "ResizedConv"}, regions)


def _conv(body: Network, image: Tensor, weights: list[Tensor], act: str) -> Tensor:
    inner = Network("body", "lowered")
    y = inner.add("Conv", *(inner.add_input(f"r{i}", t.type) for i, t in enumerate([image, *weights])))
    inner.mark_output(inner.add("Mul", y, inner.add("Sigmoid", y)) if act == "silu" else inner.add(act, y))
    return body.add("Fused", image, *weights, composite="Conv", regions={"body": inner})


SAMPLES = [
    resized(1, (16, 32), (16, 32), (4, 5), (2.0, 2.0)),
    resized(2, (64, 64), (32, 32), (9, 6), (2.0, 2.0), last=True),
    resized(3, (24, 40), (80,), (5, 6), (3.0, 2.0), act="Relu"),
    resized(1, (32, 16), (48,), (7, 5), (1.5, 2.4), how=("half_pixel", "round_prefer_floor")),
    resized(2, (128, 96), (96, 96), (20, 20), (2.0, 2.0)),
]

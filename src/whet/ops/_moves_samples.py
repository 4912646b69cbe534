"""Samples of fused layers that move numbers and compute with them on the way: detectors' heads, channels that are shuffled and scaled."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Network, parse_type
from whet.ops._base import Sample


def head(images: int, anchors: int, classes: int, *sides: tuple[int, int], filled: int = 0) -> Sample:
    """Boxes of a detector: of each level channels (anchor, x y w h score classes...) behind the pixels, decoded, all levels joined; behind them
    `filled` channels that are left out."""
    wide, rng = 5 + classes, np.random.default_rng(3)
    inputs: list[Any] = []
    for h, w in sides:
        inputs += [f"f32[{images},{anchors * wide + filled},{h},{w}]", rng.standard_normal((1, anchors, h, w, 2)).astype(np.float32)]
        inputs += [rng.random((1, anchors, 1, 1, 2)).astype(np.float32) + 1]
    inputs += [np.asarray(2.0, np.float32)]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        kinds = [t if isinstance(t, str) else f"f32{list(t.shape)}".replace(" ", "") for t in inputs]
        own = [body.add_input(f"i{i}", parse_type(t)) for i, t in enumerate(kinds)]
        two, parts = own[-1], []
        for level, (h, w) in enumerate(sides):
            x, grid, sizes = own[3 * level : 3 * level + 3]
            cut = body.constant(np.array([images, anchors, wide, h, w]), "cut")
            if filled:
                x = body.add("Slice", x, *(body.constant(np.array([n]), "bound") for n in (0, anchors * wide, 1)))
            numbers = body.add("Sigmoid", body.add("Transpose", body.add("Reshape", x, cut), perm=(0, 1, 3, 4, 2)))
            at, size, rest = body.add_layer("Split", [numbers, body.constant(np.array([2, 2, wide - 4]), "parts")], {"axis": 4}).outputs
            at = body.add("Mul", body.add("Add", body.add("Mul", at, two), grid), two)
            size = body.add("Mul", body.add("Pow", body.add("Mul", size, two), two), sizes)
            rows = body.constant(np.array([images, anchors * h * w, wide]), "rows")
            parts.append(body.add("Reshape", body.add("Concat", at, size, rest, axis=4), rows))
        body.mark_output(body.add("Concat", *parts, axis=1) if len(parts) > 1 else parts[0])
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, regions)


def shuffle(images: int, groups: int, each: int, h: int, w: int) -> Sample:
    """Two halves joined, scaled by channel, and their channels dealt out in turns."""
    c = groups * each
    inputs = [f"f32[{images},{c // 2},{h},{w}]", f"f32[{images},{c - c // 2},{h},{w}]", f"const f32[1,{c},1,1]"]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        a, b, scale = (body.add_input(n, parse_type(t.split()[-1])) for n, t in zip("abs", inputs, strict=True))
        joined = body.add("Relu", body.add("Mul", body.add("Concat", a, b, axis=1), scale))
        cut = body.constant(np.array([images, groups, each, h, w]), "cut")
        turned = body.add("Transpose", body.add("Reshape", joined, cut), perm=(0, 2, 1, 3, 4))
        body.mark_output(body.add("Reshape", turned, body.constant(np.array([images, c, h, w]), "whole")))
        return {"body": body}

    return Sample(inputs, {"composite": "Moves"}, regions)


SAMPLES = [
    head(2, 3, 2, (4, 6), (2, 3)),
    head(1, 2, 80, (20, 20), (10, 10), (5, 5)),
    head(3, 1, 1, (7, 5)),
    head(2, 3, 80, (8, 8), (4, 4)),
    shuffle(2, 2, 8, 5, 3),
    shuffle(1, 3, 4, 1, 9),
    shuffle(1, 2, 4, 2, 150),
]

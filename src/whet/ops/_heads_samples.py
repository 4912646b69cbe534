"""Samples of detectors' heads with the convolutions that they begin with."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Network, parse_type
from whet.ops._base import Sample
from whet.ops._moves_samples import head


def heads(images: int, anchors: int, classes: int, *levels: tuple[int, int, int], filled: int = 0, bias: bool = True) -> Sample:
    """Boxes of a detector from images: of each level (channels, height, width) a 1x1 convolution and what `head` has behind it; `filled`: output
    channels that nobody reads."""
    made = anchors * (5 + classes)
    moves = head(images, anchors, classes, *((h, w) for _, h, w in levels), filled=filled)
    inputs: list[Any] = []
    for c, h, w in levels:
        inputs += [f"f32[{images},{c},{h},{w}]", f"const f32[{made + filled},{c},1,1]", *([f"const f32[{made + filled}]"] if bias else [])]
    each, constants = 3 if bias else 2, [t for t in moves.inputs if isinstance(t, np.ndarray)]

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        own = [body.add_input(f"i{i}", parse_type(t.split()[-1])) for i, t in enumerate(inputs)]
        others = iter([body.add_input(f"k{i}", parse_type(f"f32{list(a.shape)}".replace(" ", ""))) for i, a in enumerate(constants)])
        convs = iter([body.add("Conv", *own[each * k : each * (k + 1)]) for k in range(len(levels))])
        fed = [next(others) if isinstance(t, np.ndarray) else next(convs) for t in moves.inputs]
        assert moves.regions is not None
        body.mark_output(body.add("Fused", *fed, composite="Moves", regions=moves.regions()))
        return {"body": body}

    return Sample([*inputs, *constants], {"composite": "HeadConvs"}, regions)


SAMPLES = [
    heads(2, 3, 2, (8, 4, 6), (16, 2, 3)),
    heads(1, 3, 80, (64, 20, 20), (20, 10, 10), (36, 5, 5), filled=1),
    heads(3, 1, 1, (12, 7, 5), bias=False),
    heads(2, 2, 11, (16, 9, 9), (32, 5, 3)),
]

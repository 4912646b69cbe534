"""The convolutions of ResNets as shapes: distinct ones with their number of occurrences, and whether a residual is added."""

from __future__ import annotations

import sys
from dataclasses import dataclass

sys.path.insert(0, "src")
from whet.tactics.cuda.conv._conv import ConvShape


@dataclass(frozen=True)
class Layer:
    """`count` equal convolutions of a network."""

    name: str
    shape: ConvShape
    residual: bool
    count: int


def resnet50(batch: int) -> list[Layer]:
    """The 52 convolutions after the stem."""
    layers: dict[tuple, list] = {}

    def add(name: str, shape: ConvShape, residual: bool) -> None:
        layers.setdefault((shape, residual), [name, 0])[1] += 1

    size, channels = 56, 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 2 else 1
            tag = f"res{stage}.{min(block, 1)}"
            out = size // stride
            add(f"{tag}.a", ConvShape(batch, size, size, channels, width), False)
            add(f"{tag}.b", ConvShape(batch, size, size, width, width, 3, 3, (stride, stride), (1, 1, 1, 1)), False)
            add(f"{tag}.c", ConvShape(batch, out, out, width, width * 4), True)
            if block == 0:
                add(f"{tag}.down", ConvShape(batch, size, size, channels, width * 4, stride=(stride, stride)), False)
            size, channels = out, width * 4
    return [Layer(name, shape, residual, count) for (shape, residual), (name, count) in layers.items()]

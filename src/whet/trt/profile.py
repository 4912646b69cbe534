"""Optimization profiles."""

from __future__ import annotations

from collections.abc import Sequence

Triple = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class IOptimizationProfile:
    """Min, opt and max shapes by input name. False until a shape is set."""

    def __init__(self) -> None:
        self.shapes: dict[str, Triple] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        """Sets the shapes of an input."""
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        """[min, opt, max] of an input; an empty list if they are not set."""
        return list(self.shapes.get(input, ()))

    def __bool__(self) -> bool:
        return bool(self.shapes)

"""Optimization profiles."""

from __future__ import annotations

from collections.abc import Sequence

Triple = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class IOptimizationProfile:
    """Min, opt and max shapes by input name. Always valid (true): `set_shape` refuses shapes that are not in order."""

    def __init__(self) -> None:
        self.shapes: dict[str, Triple] = {}
        self.extra_memory_target = 1.0
        self._values: dict[str, Triple] = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        """Sets the shapes of an input. Raises ValueError for shapes of different ranks or that are not in order."""
        shapes = (tuple(min), tuple(opt), tuple(max))
        if len({len(s) for s in shapes}) != 1 or any(not a <= b <= c for a, b, c in zip(*shapes, strict=True)):
            raise ValueError(f"the shapes of '{input}' are not in order: min {shapes[0]}, opt {shapes[1]}, max {shapes[2]}")
        self.shapes[input] = shapes

    def get_shape(self, input: str) -> list[tuple[int, ...]]:
        """[min, opt, max] of an input; an empty list if they are not set."""
        return list(self.shapes.get(input, ()))

    def set_shape_input(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> bool:
        """Keeps the values of a shape tensor. Engines of whet have none: shapes that depend on values of inputs are refused by the parser."""
        self._values[input] = (tuple(min), tuple(opt), tuple(max))
        return True

    def get_shape_input(self, input: str) -> list[tuple[int, ...]]:
        """[min, opt, max] values of a shape tensor; an empty list if they are not set."""
        return list(self._values.get(input, ()))

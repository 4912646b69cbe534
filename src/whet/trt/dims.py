"""Dims: shapes as tuples, with TensorRT's constructors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

_MAX_DIMS = 8


class Dims(tuple[int, ...]):
    """A shape: `Dims(sequence)`, `Dims()`; the subclasses also take their sizes one by one. Raises ValueError for another rank."""

    MAX_DIMS: ClassVar[int] = _MAX_DIMS
    rank: ClassVar[int | None] = None

    def __new__(cls, *sizes: int | Iterable[int]) -> Self:
        given: Any = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Iterable) else sizes
        shape = tuple(int(d) for d in given)
        if (cls.rank is not None and len(shape) != cls.rank and sizes) or len(shape) > _MAX_DIMS:
            raise ValueError(f"{cls.__name__} has {cls.rank or f'at most {_MAX_DIMS}'} sizes, not {len(shape)}: {shape}")
        if not sizes and cls.rank is not None:
            shape = (0,) * cls.rank
        return super().__new__(cls, shape)


class Dims2(Dims):
    """Two sizes."""

    rank = 2


class DimsHW(Dims2):
    """Height and width."""

    @property
    def h(self) -> int:
        """The height."""
        return self[0]

    @property
    def w(self) -> int:
        """The width."""
        return self[1]


class Dims3(Dims):
    """Three sizes."""

    rank = 3


class Dims4(Dims):
    """Four sizes."""

    rank = 4


class Permutation(Dims):
    """An order of axes. TensorRT's has eight entries; a shorter one permutes as many axes as it has."""

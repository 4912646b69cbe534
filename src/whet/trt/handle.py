"""The base of TensorRT's objects that `with` statements take."""

from __future__ import annotations

from typing import Self


class Handle:
    """`with` gives the object itself; the memory is freed with the last reference, as in TensorRT 10."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

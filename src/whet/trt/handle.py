"""The base of TensorRT's objects that `with` statements take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from whet.trt.errors import NotServedError
from whet.trt.refused import REFUSED


class Handle:
    """`with` gives the object itself; the memory is freed with the last reference, as in TensorRT 10.

    Members that are not served (refused.py) raise NotServedError when they are read or set.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            _refuse(type(self), name)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; whet.trt.coverage() lists TensorRT's names")

        def __setattr__(self, name: str, value: Any) -> None:
            _refuse(type(self), name)
            super().__setattr__(name, value)


def _refuse(cls: type, name: str) -> None:
    """Raises NotServedError for a member that TensorRT has and whet.trt does not serve."""
    for owner in cls.__mro__:
        key = f"{owner.__name__}.{name}"
        if key in REFUSED:
            raise NotServedError(key, REFUSED[key])

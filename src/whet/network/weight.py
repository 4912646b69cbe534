"""A weight: an array and its origin.

An engine weight is a small expression over the source model's weights, written with whet's own ops: folding a batch norm
gives `Mul(conv1.weight, Reshape(Div(bn1.weight, ...)))`. A refit, a fine-tuned reload or a pruning recipe can
evaluate it again, and `assumes` lists its assumptions ("equal to fc2.weight", "channels 3,7 are zero").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.forks import cached_property
from whet.network.types import TensorType, get_dtype

_MOST_TERMS = 1000  # in the text of an expression
_LARGE = 1 << 16  # bytes
DEEPEST_EXPRESSION = 100  # nested operations of an origin; engines evaluate at most 64


@dataclass(frozen=True)
class Origin:
    """The origin of a weight: a source weight (`op` is "source", `name` its name) or an op applied to origins."""

    op: str
    name: str = ""
    args: tuple[Origin | None, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    output: int = 0
    assumes: tuple[str, ...] = ()

    @cached_property
    def depth(self) -> int:
        """Nesting of operations; a source has 0. Arguments are created first and cached, so that this does not recurse."""
        return 1 + max((a.depth for a in self.args if a is not None), default=0) if self.op != "source" else 0

    @classmethod
    def of_operation(
        cls, op: str, args: tuple[Origin | None, ...], attrs: tuple[tuple[str, Any], ...], output: int, name: str, assumes: tuple[str, ...] = ()
    ) -> Origin:
        """The origin of a computed constant called `name`.

        An expression nested deeper than DEEPEST_EXPRESSION becomes a source of that name: code that walks expressions recurses.
        """
        origin = cls(op, "", args, attrs, output, assumes)
        return origin if origin.depth <= DEEPEST_EXPRESSION else cls("source", name)

    def sources(self) -> Iterator[str]:
        """Names of the source weights in the expression; a shared part is visited once."""
        waiting, seen = [self], {id(self)}
        while waiting:
            origin = waiting.pop()
            if origin.op == "source":
                yield origin.name
            new = {id(a): a for a in origin.args if a is not None and id(a) not in seen}
            seen |= set(new)
            waiting += reversed(new.values())

    def __str__(self) -> str:
        """The expression; of one with more than `_MOST_TERMS` terms the rest is "...": shared parts are repeated, so the text could grow
        exponentially."""
        return _format_origin(self, [_MOST_TERMS])


def _format_origin(origin: Origin | None, left: list[int]) -> str:
    """The text of an expression; `left` holds the number of terms that may still be written."""
    left[0] -= 1
    if origin is None or origin.op == "source":
        return "none" if origin is None else origin.name
    return f"{origin.op}({', '.join(_format_origin(a, left) for a in origin.args) if left[0] > 0 else '...'})"


@dataclass(frozen=True, eq=False)
class Weight:
    """A constant array (read-only) with its origin."""

    array: np.ndarray
    origin: Origin = field(default_factory=lambda: Origin("source"))

    def __post_init__(self) -> None:
        if self.array.flags.writeable:
            view = self.array.view()
            view.flags.writeable = False
            object.__setattr__(self, "array", view)

    @cached_property
    def type(self) -> TensorType:
        return TensorType(get_dtype(self.array), tuple(self.array.shape))

    @classmethod
    def deferred(cls, type_: TensorType, digest: str, origin: Origin, compute: Callable[[], np.ndarray]) -> Weight:
        """A weight of known type and digest; `compute` gives its array at the first access, and at the first one after each `release`."""
        weight = object.__new__(cls)
        weight.__dict__.update(type=type_, digest=digest, origin=origin, _compute=compute)
        return weight

    def compute_again_by(self, compute: Callable[[], np.ndarray]) -> None:
        """Permits `release`: `compute` gives the same array."""
        self.__dict__["_compute"] = compute

    @property
    def held(self) -> np.ndarray | None:
        """The array, or None if it was released or was not read yet."""
        return self.__dict__.get("array")

    def release(self) -> None:
        """Frees a large array with a `compute_again_by`; the next access computes it again."""
        if "_compute" in self.__dict__ and "array" in self.__dict__ and self.array.nbytes >= _LARGE:
            _ = self.type, self.digest  # computed now and kept: they are read more often than the array
            del self.__dict__["array"]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name != "array" or "_compute" not in self.__dict__:
                raise AttributeError(f"a Weight has no attribute {name!r}")
            array = self.__dict__["_compute"]()
            array.flags.writeable = False
            self.__dict__["array"] = array
            return array

    @cached_property
    def digest(self) -> str:
        """SHA-256 of type and bytes: equal weights have equal digests."""
        return compute_digest(self.type, self.array)


def compute_digest(type_: TensorType, array: np.ndarray) -> str:
    """The digest of a weight. Threads can compute several at the same time: hashing releases the GIL, while the lock of a `cached_property` of
    Python 3.11 is shared by all weights."""
    h = hashlib.sha256(str(type_).encode())
    if array.size:
        h.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return h.hexdigest()

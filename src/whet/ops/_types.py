"""Shared by infer functions: checks of element types, broadcasting and equality of shapes with symbols."""

from __future__ import annotations

from collections.abc import Sequence

from whet.errors import NetworkError, UnsupportedError
from whet.network import F64, Dim, DType, Expr, Layer, Tensor, TensorType
from whet.ops._base import Couple


def infer_same_as_input(layer: Layer) -> TensorType:
    """The type of input 0."""
    return layer.needs(0).type


def require_float_input(layer: Layer) -> TensorType:
    """The type of input 0, which must be floating point."""
    t = layer.needs(0).type
    if not t.dtype.is_float:
        raise NetworkError(f"{layer.op} '{layer.name}' takes floating point, not {t}; put a Cast before it")
    return t


def require_numeric_input(layer: Layer) -> TensorType:
    """The type of input 0, which must be numeric."""
    t = layer.needs(0).type
    if t.dtype.kind in ("bool", "string"):
        raise NetworkError(f"{layer.op} '{layer.name}' takes numbers, not {t}")
    return t


def require_one_float_type(layer: Layer, *indices: int) -> DType:
    """The type of input 0; inputs at `indices` must be floating point too, and of one type (16 bits and float32 may mix)."""
    first = require_float_input(layer).dtype
    for t in (layer.input(i) for i in indices):
        if t is not None and (not t.dtype.is_float or (t.dtype != first and F64 in (t.dtype, first))):
            raise NetworkError(f"{layer.op} '{layer.name}' takes tensors of one floating-point type, not {first} and {t}")
    return first


def normalize_axis(axis: Dim, rank: int, subject: str = "axis") -> int:
    """`axis` counted from the front. Raises NetworkError when it is out of range, UnsupportedError when it is symbolic."""
    if isinstance(axis, Expr):
        raise UnsupportedError(f"{subject} {axis} depends on a dynamic dimension; it must be a number")
    if not -rank <= axis < rank:
        raise NetworkError(f"{subject} {axis} is out of range for rank {rank}")
    return axis % rank


def broadcast(a: Sequence[Dim], b: Sequence[Dim]) -> tuple[Dim, ...]:
    """NumPy broadcasting of two shapes with symbols. Raises NetworkError."""
    n = max(len(a), len(b))
    pa, pb = (1,) * (n - len(a)) + tuple(a), (1,) * (n - len(b)) + tuple(b)
    out: list[Dim] = []
    for x, y in zip(pa, pb, strict=True):
        if x == y or y == 1:
            out.append(x)
        elif x == 1:
            out.append(y)
        elif isinstance(x - y, int):  # also N and N + 3, of which one would have to be 1
            raise NetworkError(f"shapes {list(map(str, a))} and {list(map(str, b))} do not broadcast")
        else:
            out.append(min(x, y, key=_rank_certainty))
    return tuple(out)


def _rank_certainty(d: Dim) -> int:
    """0 for a size, 1 for a symbol, 2 for an expression: of two dims of unknown relation, an expression such as max(S - 7, 1) may be 1."""
    return 0 if isinstance(d, int) else 1 if str(d).isidentifier() else 2


def may_equal(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """True if two shapes can be equal: same rank, and no axis with two different numbers."""
    return len(a) == len(b) and all(x == y or not (isinstance(x, int) and isinstance(y, int)) for x, y in zip(a, b, strict=True))


def may_broadcast_to(shape: Sequence[Dim], small: Sequence[Dim]) -> bool:
    """True if `small` can broadcast to `shape` without enlarging it."""
    lead = len(shape) - len(small)
    return lead >= 0 and all(d == 1 or may_equal((d,), (s,)) for d, s in zip(small, shape[lead:], strict=True))


def may_span(d: Dim, wide: Dim) -> bool:
    """True if an axis of size d, broadcast to `wide`, has (or, with unknown size, may have) one entry per entry of it."""
    return d != 1 and (d == wide or isinstance(d, Expr))


def unify(a: Dim, b: Dim, subject: str) -> Dim:
    """The common dimension of two tensors, the static one if either is. Raises NetworkError if they differ."""
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise NetworkError(f"{subject}: {a} is not {b}")
    return a if isinstance(a, int) else b


def list_same_axis_couples(x: Tensor, y: Tensor) -> list[Couple]:
    """Couples every axis of x to the same axis of y (pointwise ops of equal shapes)."""
    return [Couple(x, i, y, i) for i in range(x.type.rank)]

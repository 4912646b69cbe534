"""Range: start, start + step, ... below the limit. Scalars that are known only at run time give a length that depends on the data."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

from whet.errors import NetworkError
from whet.network import Dim, TensorType, ceildiv
from whet.ops._base import find_known_values, op
from whet.ops._data_sized import make_size_symbol


def infer(layer):
    dtype = layer.inputs[0].dtype
    if any(t.dtype != dtype for t in layer.inputs):
        raise NetworkError(f"takes three scalars of one type, not {[str(t.type) for t in layer.inputs]}")
    if all(t.is_constant for t in layer.inputs):
        a, b, c = (t.array().item() for t in layer.inputs)
        if c == 0:
            raise NetworkError("its step is 0")
        return TensorType(dtype, (max(int(np.ceil((b - a) / c)), 0),))
    scaled = _scale_to_integers([_find_scalar(t) for t in layer.inputs])
    if scaled is None:
        return TensorType(dtype, (make_size_symbol(layer),))
    a, b, c = scaled
    return TensorType(dtype, (ceildiv(b - a, c),))


def has_unknown_length(layer) -> bool:
    """True if the length is known only at run time."""
    return not all(t.is_constant for t in layer.inputs) and any(_find_scalar(t) is None for t in layer.inputs)


def _find_scalar(t) -> Dim | Fraction | None:
    """A scalar's value, exactly; None if it is known only at run time or not finite."""
    if (known := find_known_values(t)) is not None:
        return known[0]
    value = t.array().item() if t.is_constant else np.nan
    return Fraction(value) if np.isfinite(value) else None


def _scale_to_integers(values: Sequence[Dim | Fraction | None]) -> list[Dim] | None:
    """The values times their least common denominator: a Range of them has the same length."""
    if any(v is None for v in values):
        return None
    factor = lcm(*(v.denominator for v in values if isinstance(v, Fraction)))
    return [int(v * factor) if isinstance(v, Fraction) else v * factor for v in values if v is not None]


op(
    "Range",
    infer,
    lambda layer, a, b, c: np.arange(a.item(), b.item(), c.item(), dtype=a.dtype),
    data_sized=has_unknown_length,
    samples=[
        ([np.array(0), np.array(7), np.array(2)], {}),
        ([np.array(5), np.array(-3), np.array(-1)], {}),
        ([np.array(0.5, np.float32), np.array(3, np.float32), np.array(0.5, np.float32)], {}),
        ([np.array(3), np.array(3), np.array(1)], {}),
    ],
)

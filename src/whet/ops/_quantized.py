"""Shared by QuantizeLinear and DequantizeLinear: scales per tensor, per entry of an axis, or per block along it."""

from __future__ import annotations

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, ceildiv
from whet.ops._base import Couple
from whet.ops._types import may_equal, normalize_axis

_LEAST = np.finfo(np.float32).tiny  # the smallest scale with a finite reciprocal


def check_scale(layer: Layer) -> None:
    """Raises NetworkError if scale or zero point do not match x, or a constant scale is not finite, or not positive in a QuantizeLinear.

    A DequantizeLinear may have scales of zero, and negative ones for weights with a folded batch norm. QuantizeLinear divides by its
    scales, so that they must be large enough for a finite reciprocal in float32.
    """
    x, scale, zero = layer.needs(0), layer.needs(1), layer.input(2)
    axis, block = layer.attrs["axis"], layer.attrs["block_size"]
    where = f"{layer.op} '{layer.name}'"
    if zero is not None and not may_equal(zero.shape, scale.shape) and {zero.shape, scale.shape} != {(), (1,)}:
        raise NetworkError(f"{where}: scale {scale} and zero point {zero} differ in shape")
    if block:
        axis = normalize_axis(axis, x.type.rank)
        want = tuple(ceildiv(d, block) if i == axis else d for i, d in enumerate(x.shape))
        if not may_equal(scale.shape, want):
            raise NetworkError(f"{where}: blocks of {block} along axis {axis} of {x} need scales {want}, not {scale}")
    elif scale.shape not in ((), (1,)):
        axis = normalize_axis(axis, x.type.rank)
        if not may_equal(scale.shape, (x.shape[axis],)):
            raise NetworkError(f"{where}: {scale} is not one value per entry of axis {axis} of {x}")
    if scale.is_constant:
        values = scale.array().astype(np.float32, copy=False)
        divides = layer.op == "QuantizeLinear"
        valid = np.isfinite(values) & ((values >= _LEAST) if divides else True)
        if not valid.all():
            odd = values[~valid].reshape(-1)[0]
            raise NetworkError(f"{where}: the scale %{scale.name} has a value of {odd:g}; scales must be finite{' and positive' if divides else ''}")


def reshape_to_broadcast(v: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """Scales (or zero points) shaped to broadcast over `shape`."""
    if block:
        return np.repeat(v, min(block, shape[axis]), axis=axis)[tuple(slice(n) for n in shape)]
    if v.size == 1:  # for any axis: ONNX Runtime's quantizer writes biases of shape [1] with axis 1
        return v.reshape(())
    column = [1] * len(shape)
    column[axis] = -1
    return v.reshape(column)


def scale_couples(layer: Layer) -> list[Couple]:
    """Couples all axes of x and y, and the scales with their axis; an axis with blocks is not coupled."""
    x, y, block = layer.needs(0), layer.output, layer.attrs["block_size"]
    axis = layer.attrs["axis"] % max(x.type.rank, 1)
    couples = [Couple(x, i, y, i) for i in range(y.type.rank) if not (block and i == axis)]
    for t in layer.inputs[1:]:
        if t is None:
            continue
        if block:
            couples += [Couple(t, i, y, i) for i in range(y.type.rank) if i != axis]
        elif t.shape not in ((), (1,)):
            couples.append(Couple(t, 0, y, axis))
    return couples

"""A Fourier transform of a known, short length becomes a product with a constant matrix (DFT) or a convolution along the signal (STFT).

The matrix holds the results of the transform for unit vectors. Up to `_LARGEST` entries the product is at most as slow as a fast transform in NumPy.
Against ONNX Runtime, quiet, 2 threads of a Xeon: STFT of 16,000 samples by 512 and 128 0.57 ms (1.00), DFT of [1,128,256] 0.22 ms (0.45).
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.ops._base import get_op
from whet.ops._frequency import find_known_scalar
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_LARGEST = 1 << 21  # entries of a matrix: 8 MiB
_ZERO = 1e-13  # the error of a sine or cosine in float64


@rule("DFT", "STFT", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"])
def transform_to_product(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if g.channel_alignment != 1 or layer.needs(0).dtype.name != "f32" or layer.needs(0).is_constant:
        return None  # a GPU has kernels for these, and would multiply with the 11 bits of TF32
    if not g.is_sized((*layer.needs(0).shape, *layer.output.shape)):
        return Skip("its shape depends on data")
    return _multiply_frames(g, layer) if layer.op == "STFT" else _multiply_lines(g, layer)


def _multiply_lines(g: Graph, layer: Layer) -> Tensor | Skip:
    x, y = layer.needs(0), layer.output
    rank = x.type.rank
    axis = find_known_scalar(layer, 2, "axis")
    axis = (axis if isinstance(axis, int) else -2) % rank
    given = find_known_scalar(layer, 1, "dft_length")
    length, parts = x.shape[axis], x.shape[-1]
    if not isinstance(length, int) or not isinstance(y.shape[axis], int):
        return Skip(f"the length of axis {axis} is dynamic: {x.type}")
    assert isinstance(parts, int)
    bins, results = static_shape((y.shape[axis], y.shape[-1]))
    used = min(length, int(given)) if isinstance(given, int) and not _is_half(layer) else length
    if used * parts * bins * results > _LARGEST:
        return Skip(f"a transform of {used} values is faster in steps than as a product")
    if used < length:
        x = g.add("Slice", x, starts=(0,), ends=(used,), axes=(axis,), steps=(1,))
    perm = (*(i for i in range(rank) if i != axis and i != rank - 1), axis, rank - 1)
    moves = perm != tuple(range(rank))
    lines = g.add("Transpose", x, perm=perm) if moves else x
    matrix = g.constant(_compute_matrix(layer, used, parts, given if isinstance(given, int) else None), f"{layer.name}.matrix")
    product = g.add("MatMul", g.add("Reshape", lines, shape=(*lines.shape[:-2], used * parts)), matrix)
    result = g.add("Reshape", product, shape=(*lines.shape[:-2], bins, results))
    return g.add("Transpose", result, perm=tuple(int(i) for i in np.argsort(perm))) if moves else result


def _is_half(layer: Layer) -> bool:
    """True for the inverse of a transform whose second half was left out."""
    return bool(layer.attrs["inverse"] and layer.attrs["onesided"])


def _compute_matrix(layer: Layer, length: int, parts: int, given: int | None) -> np.ndarray:
    """[length * parts, bins * 2 (or 1)]: the transforms of unit vectors, in float64."""
    units = np.eye(length * parts).reshape(length * parts, length, parts)
    flat = Layer(layer.op, layer.name, (), dict(layer.attrs))
    rows = np.asarray(get_op("DFT").reference(flat, units, None if given is None else np.array(given), np.array(1)))
    return _round(rows.reshape(length * parts, -1))


def _round(values: np.ndarray) -> np.ndarray:
    """Sines and cosines in float32, with exact zeros."""
    return np.ascontiguousarray(np.where(np.abs(values) < _ZERO, 0, values), np.float32)


def _multiply_frames(g: Graph, layer: Layer) -> Tensor | Skip:
    """A convolution [N, parts, samples] -> [N, bins * 2, frames] whose filters are the transforms of unit vectors times the window."""
    x, y, window = layer.needs(0), layer.output, layer.input(2)
    step, length = find_known_scalar(layer, 1, "frame_step"), find_known_scalar(layer, 3, "frame_length")
    if window is not None and not window.is_constant:
        return Skip(f"its window %{window.name} is computed at run time")
    size = static_shape(window.shape)[0] if window is not None else length
    parts = x.shape[2] if x.type.rank == 3 else 1
    if not isinstance(step, int) or not isinstance(size, int) or not isinstance(parts, int):
        return Skip("its frames have a dynamic length")
    bins = static_shape(y.shape[2:3])[0]
    if prod((size, parts, bins, 2)) > _LARGEST:
        return Skip(f"a transform of {size} values is faster in steps than as a convolution")
    units = np.eye(size * parts).reshape(size * parts, size, parts)
    scale = np.ones(size) if window is None else np.asarray(window.array(), np.float64)
    flat = Layer("STFT", layer.name, (), dict(layer.attrs))
    filters = np.asarray(get_op("STFT").reference(flat, units, np.array(size), scale)).reshape(size, parts, bins * 2)
    weights = _round(filters.transpose(2, 1, 0))
    signal = g.add("Reshape", x, shape=(x.shape[0], 1, x.shape[1])) if parts == 1 else g.add("Transpose", x, perm=(0, 2, 1))
    frames = g.add("Conv", signal, g.constant(weights, f"{layer.name}.filters"), kernel_shape=(size,), strides=(step,))
    return g.add("Reshape", g.add("Transpose", frames, perm=(0, 2, 1)), shape=y.shape)

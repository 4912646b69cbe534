"""Adaptive weight rounding (GPTQ): weights not yet rounded compensate the rounding error of those already rounded.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) after Optimal Brain Surgeon: the squared output error of a layer is quadratic in its weights,
with the second moments H of its inputs as the matrix. Columns are rounded in descending order of their diagonal in H, and the error of each
is distributed over the remaining columns so that the output changes least. Here H is computed from the rounded inputs and centred, since
bias correction compensates the mean. A layer keeps the result only if it lowers the error on held-out samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from whet.network import Layer
from whet.precision._taps import Taps

ROWS = 16384  # input windows that H is computed from, over all samples
WIDEST = 4608  # largest number of weights per output channel: H has this number squared elements
DAMPING = 0.01  # damping, relative to the mean diagonal
BLOCK_COLUMNS = 64  # columns per block whose errors are distributed together
_PAYS = 0.98
Grid = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(column of weights, scale per row) -> the nearest representable values, in real units."""


def fits(layer: Layer) -> bool:
    """Whether GPTQ applies: an ungrouped Conv, a Gemm or a MatMul with at most WIDEST inputs per output channel."""
    w = layer.needs(1)
    if layer.op == "Conv":
        return layer.attrs["group"] == 1 and int(np.prod(w.shape[1:])) <= WIDEST
    return w.type.rank == 2 and max(w.shape) <= WIDEST


def sample_windows(layer: Layer, x: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most `most` input windows, f32 [windows, inputs], sampled from all positions."""
    if layer.op != "Conv":
        rows = x.reshape(-1, x.shape[-1])
        return rows[np.sort(rng.permutation(len(rows))[:most])]
    seen = Taps.of(layer, x)
    chosen = np.sort(rng.permutation(x.shape[0] * int(np.prod(seen.sizes)))[:most])
    image, *place = np.unravel_index(chosen, (x.shape[0], *seen.sizes))
    out = np.empty((len(chosen), x.shape[1], *seen.taps), np.float32)
    for tap in np.ndindex(*seen.taps):
        out[(slice(None), slice(None), *tap)] = seen.get_elements_at(tap, image, tuple(place))
    return out.reshape(len(chosen), -1)


def compute_moments(layer: Layer, inputs: Iterable[np.ndarray], count: int) -> np.ndarray:
    """H of `count` input arrays: the centred second moments per window, f64 [inputs, inputs]."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([sample_windows(layer, x, max(1, ROWS // max(count, 1)), rng) for x in inputs])
    rows = rows - rows.mean(axis=0)
    return (rows.T @ rows).astype(np.float64) / len(rows)


def as_rows(layer: Layer, w: np.ndarray) -> np.ndarray:
    """Weights as [output channels, inputs]."""
    if layer.op == "Conv":
        return w.reshape(w.shape[0], -1)
    return w if layer.op == "Gemm" and layer.attrs["transB"] else w.T


def from_rows(layer: Layer, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of as_rows."""
    if layer.op == "Conv" or (layer.op == "Gemm" and layer.attrs["transB"]):
        return np.ascontiguousarray(rows.reshape(shape))
    return np.ascontiguousarray(rows.T)


def round_rows(w: np.ndarray, scales: np.ndarray, h: np.ndarray, grid: Grid) -> np.ndarray:
    """Rounds weights [k, n] (f64) to the grid (representable values times the scale of each row), compensating errors by H [n, n]."""
    n = w.shape[1]
    order = np.argsort(-np.diag(h), kind="stable")
    damped = h[np.ix_(order, order)] + DAMPING * max(float(np.diag(h).mean()), 1e-30) * np.eye(n)
    # Upper Cholesky factor of the inverse: row j distributes the error of column j over the later columns.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = np.linalg.inv(lower)[::-1, ::-1]  # inverse(damped) = upper.T @ upper, upper triangular
    left, out = np.array(w[:, order], np.float64), np.empty_like(w, dtype=np.float64)
    for start in range(0, n, BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, n)
        errors = np.empty((w.shape[0], end - start))
        for j in range(start, end):
            out[:, j] = grid(left[:, j], scales)
            errors[:, j - start] = (left[:, j] - out[:, j]) / upper[j, j]
            left[:, j + 1 : end] -= np.outer(errors[:, j - start], upper[j, j + 1 : end])
        left[:, end:] -= errors @ upper[start:end, end:]
    back = np.empty(n, np.int64)
    back[order] = np.arange(n)
    return out[:, back]


def compute_expected_error(w: np.ndarray, q: np.ndarray, h: np.ndarray) -> float:
    """The expected squared error of the layer's output per window, summed over channels."""
    d = q - w
    return float(np.sum((d @ h) * d))


def adapt_weights(
    layer: Layer, w: np.ndarray, nearest: np.ndarray, scales: np.ndarray, halves: tuple[np.ndarray, np.ndarray], grid: Grid
) -> np.ndarray | None:
    """The layer's weights rounded by GPTQ, or None if that does not help on held-out data. `halves` are the moments of two sample halves."""
    rows, plain = as_rows(layer, w).astype(np.float64), as_rows(layer, nearest).astype(np.float64)
    seen, other = halves
    if compute_expected_error(rows, round_rows(rows, scales, seen, grid), other) > _PAYS * compute_expected_error(rows, plain, other):
        return None
    return from_rows(layer, round_rows(rows, scales, (seen + other) / 2, grid), w.shape).astype(np.float32)

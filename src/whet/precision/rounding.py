"""Weights rounded against the error of their layer: what rounding one weight costs is made good by those that are not rounded yet.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) after Optimal Brain Surgeon: a layer's squared error is quadratic in its weights, with the second
moments H of its inputs as the matrix. Columns are rounded one by one, those that matter most first, and each one's error is spread over the
rest so that the layer's output moves least. Here H is of the inputs as they are rounded themselves and about their means, for the mean's
part is what the correction of the bias takes back. A layer keeps the result where it lowers the error on samples that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from whet.network import Layer
from whet.precision._taps import Taps

ROWS = 16384  # input windows that make H, spread over all samples
WIDEST = 4608  # weights of an output channel: H is this number squared
_DAMP = 0.01  # of the mean diagonal, added to it
_BLOCK = 64  # columns whose errors are spread over the later ones at once
_PAYS = 0.98
Grid = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(column of weights, scale of each) -> the numbers that can be stored, in real units."""


def fits(layer: Layer) -> bool:
    """Whether the layer is one that is rounded so: a Conv of one group, a Gemm or MatMul, with not too many inputs."""
    w = layer.needs(1)
    if layer.op == "Conv":
        return layer.attrs["group"] == 1 and int(np.prod(w.shape[1:])) <= WIDEST
    return w.type.rank == 2 and max(w.shape) <= WIDEST


def windows(layer: Layer, x: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most `most` rows of what the weights of one output channel are multiplied with, f32 [rows, inputs], drawn from all places."""
    if layer.op != "Conv":
        rows = x.reshape(-1, x.shape[-1])
        return rows[np.sort(rng.permutation(len(rows))[:most])]
    seen = Taps.of(layer, x)
    chosen = np.sort(rng.permutation(x.shape[0] * int(np.prod(seen.sizes)))[:most])
    image, *place = np.unravel_index(chosen, (x.shape[0], *seen.sizes))
    out = np.empty((len(chosen), x.shape[1], *seen.taps), np.float32)
    for tap in np.ndindex(*seen.taps):
        out[(slice(None), slice(None), *tap)] = seen.met_at(tap, image, tuple(place))
    return out.reshape(len(chosen), -1)


def moments(layer: Layer, inputs: Iterable[np.ndarray], count: int) -> np.ndarray:
    """H of `count` input arrays, f64 [inputs, inputs]: about the mean, for one window."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([windows(layer, x, max(1, ROWS // max(count, 1)), rng) for x in inputs])
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


def rounded_rows(w: np.ndarray, scales: np.ndarray, h: np.ndarray, grid: Grid) -> np.ndarray:
    """Weights [k, n] (f64) on the grid (its numbers times the scale of each row), rounded against H [n, n]."""
    n = w.shape[1]
    order = np.argsort(-np.diag(h), kind="stable")
    damped = h[np.ix_(order, order)] + _DAMP * max(float(np.diag(h).mean()), 1e-30) * np.eye(n)
    # The upper factor of the inverse: its row j says how an error in column j is spread over the later ones.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    upper = np.linalg.inv(lower)[::-1, ::-1]  # inverse(damped) = upper.T @ upper, upper triangular
    left, out = np.array(w[:, order], np.float64), np.empty_like(w, dtype=np.float64)
    for start in range(0, n, _BLOCK):
        end = min(start + _BLOCK, n)
        errors = np.empty((w.shape[0], end - start))
        for j in range(start, end):
            out[:, j] = grid(left[:, j], scales)
            errors[:, j - start] = (left[:, j] - out[:, j]) / upper[j, j]
            left[:, j + 1 : end] -= np.outer(errors[:, j - start], upper[j, j + 1 : end])
        left[:, end:] -= errors @ upper[start:end, end:]
    back = np.empty(n, np.int64)
    back[order] = np.arange(n)
    return out[:, back]


def error(w: np.ndarray, q: np.ndarray, h: np.ndarray) -> float:
    """The squared error of the layer's output, all channels, for one window."""
    d = q - w
    return float(np.sum((d @ h) * d))


def adapted(
    layer: Layer, w: np.ndarray, nearest: np.ndarray, scales: np.ndarray, halves: tuple[np.ndarray, np.ndarray], grid: Grid
) -> np.ndarray | None:
    """The weights of the layer rounded against H, where on the other half of the samples that pays; else None. `halves` are their moments."""
    rows, plain = as_rows(layer, w).astype(np.float64), as_rows(layer, nearest).astype(np.float64)
    seen, other = halves
    if error(rows, rounded_rows(rows, scales, seen, grid), other) > _PAYS * error(rows, plain, other):
        return None
    return from_rows(layer, rounded_rows(rows, scales, (seen + other) / 2, grid), w.shape).astype(np.float32)

"""Closed-form least squares for one layer: weights that best reproduce the original outputs from the cut inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from whet.network import Layer
from whet.ops._window import gather_windows
from whet.ops.conv import get_window_attributes

_FEWEST_DIGITS = 1e-4  # relative penalty from which float32 products are exact enough: their error is some 1e-6
_STEPS = 5  # of the minimization with bounds
_BLOCK = 4096  # rows of a float32 product; the blocks are added in float64


@dataclass(frozen=True)
class Problem:
    """Rows of the layer's inputs, [groups, rows, k], and of its target outputs, [groups, rows, out]; float32 or float64 as `select_row_type` says.

    `low` and `high`, in the shape of `y`: all outputs beyond these bounds mean the same, since only a Relu or Clip reads them.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def find_nearest_targets(self, made: np.ndarray) -> np.ndarray:
        """The targets nearest to the outputs `made` among those that mean the same as `y`."""
        nearest = self.y
        if self.low is not None:
            nearest = np.where(self.y <= self.low, np.minimum(made, self.low), nearest)
        if self.high is not None:
            nearest = np.where(self.y >= self.high, np.maximum(made, self.high), nearest)
        return nearest


def select_row_type(ridge: float) -> type[np.floating]:
    """The type of a problem's rows: float32, twice as fast, if the penalty bounds the condition of the Gram matrix."""
    return np.float32 if ridge >= _FEWEST_DIGITS else np.float64


def _compute_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a' b over the rows, float64 [groups, k, out]."""
    if a.dtype == np.float64:
        return a.transpose(0, 2, 1) @ b
    total = np.zeros((len(a), a.shape[2], b.shape[2]))
    for i in range(0, a.shape[1], _BLOCK):
        left, right = a[:, i : i + _BLOCK], b[:, i : i + _BLOCK]
        total += left.transpose(0, 2, 1) @ right
    return total


def solve(p: Problem, w: np.ndarray, *, ridge: float, intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights [groups, k, out] near `w` and the intercept [groups, out] (zeros without): minimises
    ||y - x W - b||^2 + ridge * mean(diag(x'x)) * ||W - w||^2. The pull towards `w` keeps directions that the data do not determine.

    Values beyond a bound of the problem count by their distance to the bound alone. That is convex, and it is minimised by accelerated
    majorization: each step is a least-squares problem with the same Gram matrix, towards the nearest targets that mean the same (A. Beck and
    M. Teboulle, SIAM Journal on Imaging Sciences 2, 2009).
    """
    kind = p.x.dtype.type
    unfitted = p.x @ w.astype(kind)
    shift_x = p.x.mean(1, keepdims=True, dtype=np.float64) if intercept else np.zeros((len(p.x), 1, p.x.shape[2]))
    x = p.x - shift_x.astype(kind)
    gram = _compute_product(x, x)
    k = gram.shape[-1]
    load = ridge * np.trace(gram, axis1=1, axis2=2) / k
    gram[:, np.arange(k), np.arange(k)] += np.maximum(load, 1e-12)[:, None]

    def fit(targets: np.ndarray, solved: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        rest = targets - unfitted
        shift_r = rest.mean(1, keepdims=True, dtype=np.float64) if intercept else np.zeros((len(rest), 1, rest.shape[2]))
        delta = solved(_compute_product(x, rest - shift_r.astype(kind)))
        b = (shift_r - shift_x @ delta)[:, 0] if intercept else np.zeros((w.shape[0], w.shape[2]))
        return w + delta, b

    if not p.bounded:
        return fit(p.y, lambda right: np.linalg.solve(gram, right))
    inverse = np.linalg.inv(gram)
    made, ahead, momentum = unfitted, unfitted, 1.0
    for _ in range(_STEPS):
        fitted = fit(p.find_nearest_targets(ahead), lambda right: inverse @ right)
        last, made = made, p.x @ fitted[0].astype(kind) + fitted[1][:, None].astype(kind)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead, momentum = made + kind((momentum - 1) / following) * (made - last), following
    return fitted


def gather_conv_rows(layer: Layer, x: np.ndarray, w: np.ndarray, at: np.ndarray, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """Input windows of a Conv at output positions `at` (flat over N and space): [groups, rows, C/group * kernel]."""
    strides, dilations, pads = get_window_attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    v = gather_windows(x, w.shape[2:], strides, dilations, pads, 0)  # [N, C, *out, *kernel]
    places = np.unravel_index(at, (v.shape[0], *v.shape[2 : 2 + r]))
    picked = np.moveaxis(v, 1, 1 + r)[places]  # [rows, C, *kernel]
    return picked.reshape(len(at), group, -1).transpose(1, 0, 2).astype(dtype)


def gather_conv_outputs(y: np.ndarray, group: int, at: np.ndarray, dtype: type[np.floating] = np.float64) -> np.ndarray:
    """Outputs [N, K, *out] at the same positions: [groups, rows, K/group]."""
    places = np.unravel_index(at, (y.shape[0], *y.shape[2:]))
    picked = np.moveaxis(y, 1, -1)[places]
    return picked.reshape(len(at), group, -1).transpose(1, 0, 2).astype(dtype)


def convert_conv_to_matrix(w: np.ndarray, group: int) -> np.ndarray:
    """Conv weights [K, C/group, *kernel] as [groups, C/group * kernel, K/group]."""
    return w.reshape(group, w.shape[0] // group, -1).transpose(0, 2, 1).astype(np.float64)


def convert_matrix_to_conv(m: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The inverse of convert_conv_to_matrix, in the shape and dtype of `like`."""
    return np.ascontiguousarray(m.transpose(0, 2, 1).reshape(like.shape).astype(like.dtype))

"""Closed-form least squares for one layer: weights that best reproduce the original outputs from the cut inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer
from whet.ops._window import gather_windows
from whet.ops.conv import attributes


@dataclass(frozen=True)
class Problem:
    """Rows of the layer's inputs, float64 [groups, rows, k], and of its target outputs, [groups, rows, out]."""

    x: np.ndarray
    y: np.ndarray


def solve(p: Problem, w: np.ndarray, *, ridge: float, intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights [groups, k, out] near `w` and the intercept [groups, out] (zeros without): minimises
    ||y - x W - b||^2 + ridge * mean(diag(x'x)) * ||W - w||^2. The pull towards `w` keeps directions that the data do not determine.
    """
    rest = p.y - p.x @ w
    shift_x = p.x.mean(1, keepdims=True) if intercept else np.zeros_like(p.x[:, :1])
    shift_r = rest.mean(1, keepdims=True) if intercept else np.zeros_like(rest[:, :1])
    x, r = p.x - shift_x, rest - shift_r
    gram = x.transpose(0, 2, 1) @ x
    k = gram.shape[-1]
    load = ridge * np.trace(gram, axis1=1, axis2=2) / k
    gram[:, np.arange(k), np.arange(k)] += np.maximum(load, 1e-12)[:, None]
    delta = np.linalg.solve(gram, x.transpose(0, 2, 1) @ r)
    made = w + delta
    b = (shift_r - shift_x @ delta)[:, 0] if intercept else np.zeros((w.shape[0], w.shape[2]))
    return made, b


def conv_rows(layer: Layer, x: np.ndarray, w: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Input windows of a Conv at output positions `at` (flat over N and space): float64 [groups, rows, C/group * kernel]."""
    strides, dilations, pads = attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    v = gather_windows(x, w.shape[2:], strides, dilations, pads, 0)  # [N, C, *out, *kernel]
    places = np.unravel_index(at, (v.shape[0], *v.shape[2 : 2 + r]))
    picked = np.moveaxis(v, 1, 1 + r)[places]  # [rows, C, *kernel]
    return picked.reshape(len(at), group, -1).transpose(1, 0, 2).astype(np.float64)


def conv_outputs(y: np.ndarray, group: int, at: np.ndarray) -> np.ndarray:
    """Outputs [N, K, *out] at the same positions: float64 [groups, rows, K/group]."""
    places = np.unravel_index(at, (y.shape[0], *y.shape[2:]))
    picked = np.moveaxis(y, 1, -1)[places]
    return picked.reshape(len(at), group, -1).transpose(1, 0, 2).astype(np.float64)


def conv_matrix(w: np.ndarray, group: int) -> np.ndarray:
    """Conv weights [K, C/group, *kernel] as [groups, C/group * kernel, K/group]."""
    return w.reshape(group, w.shape[0] // group, -1).transpose(0, 2, 1).astype(np.float64)


def conv_weights(m: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The inverse of conv_matrix, in the shape and dtype of `like`."""
    return np.ascontiguousarray(m.transpose(0, 2, 1).reshape(like.shape).astype(like.dtype))

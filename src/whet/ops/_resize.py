"""Resampling of one axis: input taps and weights of each output (definitions of ONNX Resize)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.errors import NetworkError

MODES = ("nearest", "linear", "cubic")
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")
ROUNDING = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True)
class Resampling:
    """Resampling options of an axis; the fields are Resize's attributes."""

    mode: str
    coordinates: str
    rounding: str
    cubic: float
    exclude_outside: bool
    extrapolation: float
    antialias: bool

    def positions(self, n: int, out: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
        """Input coordinate of each output, in elements, as float64."""
        i = np.arange(out, dtype=np.float64)
        match self.coordinates:
            case "half_pixel":
                return (i + 0.5) / scale - 0.5
            case "half_pixel_symmetric":
                shrunk = out / (n * scale)  # rounding ratio of the output size
                return n / 2 * (1 - shrunk) + (i + 0.5) / scale - 0.5
            case "pytorch_half_pixel":
                return (i + 0.5) / scale - 0.5 if out > 1 else np.zeros(1)
            case "align_corners":
                return i * (n - 1) / (n * scale - 1) if out > 1 else np.zeros(1)
            case "asymmetric":
                return i / scale
            case "tf_crop_and_resize":
                start, end = roi
                if out > 1:
                    return start * (n - 1) + i * (end - start) * (n - 1) / (out - 1)
                return np.full(1, 0.5 * (start + end) * (n - 1))
        raise NetworkError(f"unknown coordinate_transformation_mode {self.coordinates!r}")

    def taps(self, n: int, out: int, scale: float, roi: tuple[float, float]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """(inputs [out, taps], weights [out, taps] or None for a copy, outputs outside the input or None)."""
        at = self.positions(n, out, scale, roi)
        outside = (at < 0) | (at > n - 1) if self.coordinates == "tf_crop_and_resize" else None
        if self.mode == "nearest":
            return np.clip(self._round(at), 0, n - 1).astype(np.intp)[:, None], None, outside
        wide = max(1 / scale, 1.0) if self.antialias else 1.0
        reach = (1 if self.mode == "linear" else 2) * wide
        first = np.floor(at - reach).astype(np.intp) + 1
        count = int(np.ceil(2 * reach)) + (1 if wide > 1 else 0)
        index = first[:, None] + np.arange(count)
        distance = np.abs(at[:, None] - index) / wide
        weights = np.clip(1 - distance, 0, None) if self.mode == "linear" else self._cubic(distance)
        if self.exclude_outside:
            weights = np.where((index >= 0) & (index < n), weights, 0)
        if self.exclude_outside or wide > 1:
            weights = weights / weights.sum(axis=1, keepdims=True)
        return np.clip(index, 0, n - 1), weights, outside

    def _round(self, at: np.ndarray) -> np.ndarray:
        match self.rounding:
            case "round_prefer_floor":
                return np.ceil(at - 0.5)
            case "round_prefer_ceil":
                return np.floor(at + 0.5)
            case "floor":
                return np.floor(at)
            case "ceil":
                return np.ceil(at)
        raise NetworkError(f"unknown nearest_mode {self.rounding!r}")

    def _cubic(self, d: np.ndarray) -> np.ndarray:
        a = self.cubic
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0))

    def apply(self, x: np.ndarray, axis: int, out: int, scale: float, roi: tuple[float, float]) -> tuple[np.ndarray, np.ndarray | None]:
        """x with `axis` resampled to `out` elements, and a mask of those outside the input."""
        index, weights, outside = self.taps(x.shape[axis], out, scale, roi)
        if weights is None:
            return np.take(x, index[:, 0], axis=axis), outside
        weights = weights.astype(x.dtype)
        column = [1] * x.ndim
        column[axis] = out
        y = np.take(x, index[:, 0], axis=axis) * weights[:, 0].reshape(column)
        for k in range(1, index.shape[1]):
            y += np.take(x, index[:, k], axis=axis) * weights[:, k].reshape(column)
        return y, outside

    def apply_transposed(self, g: np.ndarray, axis: int, n: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
        """The transpose of `apply`: adds each output of `g` along `axis` to the inputs it reads (of `n`), times their weights."""
        index, weights, outside = self.taps(n, g.shape[axis], scale, roi)
        last = np.moveaxis(g, axis, 0)
        if outside is not None:
            last = np.where(outside.reshape(-1, *(1,) * (g.ndim - 1)), 0, last)
        result = np.zeros((n, *last.shape[1:]), g.dtype)
        for k in range(index.shape[1]):
            np.add.at(result, index[:, k], last if weights is None else last * weights[:, k].astype(g.dtype).reshape(-1, *(1,) * (g.ndim - 1)))
        return np.moveaxis(result, 0, axis)

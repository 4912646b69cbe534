"""What the op means: output type, NumPy reference, coupled axes.

y[n, k, p] = bias[k] + sum over taps t and channels c of w[k, c, t] * x[n, c] at (row, column) of tap t at p + offset[n, 2t : 2t+2, p]. Values between
pixels are interpolated linearly; pixels outside of the image are zero. `strides` and `pads` have one value for rows and one for columns.
"""

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, TensorType
from whet.ops import Couple


def infer(layer: Layer) -> TensorType:
    """x [N, C, H, W], w [K, C, h, w], offset [N, 2*h*w, oh, ow], bias [K] or absent -> y [N, K, oh, ow]."""
    x, w, offset, bias = layer.needs(0), layer.needs(1), layer.needs(2), layer.input(3)
    if x.type.rank != 4 or w.type.rank != 4 or offset.type.rank != 4:
        raise NetworkError(f"takes tensors of rank 4, not {x.type}, {w.type}, {offset.type}")
    (n, channels, *size), (filters, own, *kernel) = x.shape, w.shape
    if own != channels or (bias is not None and bias.shape != (filters,)):
        raise NetworkError(f"weights {w.type} and bias {bias and bias.type} do not fit {x.type}")
    strides, pads = layer.attrs["strides"], layer.attrs["pads"]
    out = [(size[i] + 2 * pads[i] - kernel[i]) // strides[i] + 1 for i in range(2)]
    if offset.shape != (n, 2 * kernel[0] * kernel[1], *out):
        raise NetworkError(f"the offsets {offset.type} are not of type f32[{n},{2 * kernel[0] * kernel[1]},{out[0]},{out[1]}]")
    return x.type.with_shape((n, filters, *out))


def sampled(layer: Layer, x: np.ndarray, taps: tuple[int, int], offset: np.ndarray) -> np.ndarray:
    """The image's values at every tap: [N, C, taps, oh, ow]."""
    (n, channels, height, width), (oh, ow) = x.shape, offset.shape[2:]
    strides, pads = layer.attrs["strides"], layer.attrs["pads"]
    i, j = np.indices(taps).reshape(2, -1, 1, 1)
    shift = offset.reshape(n, -1, 2, oh, ow)
    v = np.arange(oh)[:, None] * strides[0] - pads[0] + i + shift[:, :, 0]
    u = np.arange(ow) * strides[1] - pads[1] + j + shift[:, :, 1]
    v0, u0 = np.floor(v), np.floor(u)
    flat = x.reshape(n, channels, height * width)
    total = np.zeros((n, channels, i.size, oh, ow), x.dtype)
    for a in (0, 1):
        for b in (0, 1):
            weight = (1 - np.abs(v - v0 - a)) * (1 - np.abs(u - u0 - b))
            inside = (v0 + a >= 0) & (v0 + a < height) & (u0 + b >= 0) & (u0 + b < width)
            at = np.where(inside, (v0 + a) * width + u0 + b, 0).astype(np.int64)
            values = np.take_along_axis(flat[:, :, None], at.reshape(n, 1, i.size, -1), axis=3).reshape(total.shape)
            total += np.where(inside, weight, 0)[:, None].astype(x.dtype) * values
    return total


def reference(layer: Layer, x: np.ndarray, w: np.ndarray, offset: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """The op in NumPy, without regard to speed."""
    taps = sampled(layer, x, w.shape[2:], offset)
    y = np.einsum("nctyx,kct->nkyx", taps.astype(np.float64), w.reshape(*w.shape[:2], -1)).astype(x.dtype)
    return y if bias is None else y + bias[:, None, None]


def couples(layer: Layer) -> list[Couple]:
    """Channels of x go with those of the weights, filters with channels of y."""
    x, w, bias, y = layer.needs(0), layer.needs(1), layer.input(3), layer.output
    tied = [Couple(x, 0, y, 0), Couple(x, 1, w, 1, summed=True), Couple(w, 0, y, 1)]
    return tied if bias is None else [*tied, Couple(bias, 0, y, 1)]

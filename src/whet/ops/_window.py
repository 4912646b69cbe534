"""What windowed ops share: output sizes from kernel, stride, dilation and padding; windows as a strided view."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.errors import NetworkError
from whet.network import Dim, ceildiv, floordiv


def out_size(size: Dim, kernel: int, stride: int, dilation: int, before: int, after: int, ceil: bool = False) -> Dim:
    """Output length of one spatial axis. Raises NetworkError when the window is larger than the padded input."""
    span = size + before + after - (dilation * (kernel - 1) + 1)
    if isinstance(span, int) and span < 0:
        raise NetworkError(f"a window of {kernel} (dilation {dilation}) does not fit into {size} + padding {before} + {after}")
    n = (ceildiv(span, stride) if ceil else floordiv(span, stride)) + 1
    if ceil and isinstance(n, int) and isinstance(size, int) and (n - 1) * stride >= size + before:
        n -= 1  # ONNX and PyTorch: the last window must start inside the input or its leading padding
    return n


def same_pads(sizes: Sequence[Dim], kernel, strides, dilations, upper: bool) -> tuple[int, ...] | None:
    """Explicit pads for auto_pad SAME_UPPER/SAME_LOWER, or None while a size is symbolic and its stride is not 1."""
    before, after = [], []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        span = d * (k - 1) + 1
        if isinstance(n, int):
            total = max((-(-n // s) - 1) * s + span - n, 0)
        elif s == 1:
            total = span - 1
        else:
            return None
        small, large = total // 2, total - total // 2
        before.append(small if upper else large)
        after.append(large if upper else small)
    return (*before, *after)


def windows(x: np.ndarray, kernel, strides, dilations, pads, fill, extra_after=None) -> np.ndarray:
    """A view [N, C, *out, *kernel] of the padded `x` [N, C, *spatial]; `extra_after` adds padding at the end (ceil mode)."""
    r = len(kernel)
    after = [pads[r + i] + (extra_after[i] if extra_after else 0) for i in range(r)]
    x = np.pad(x, [(0, 0), (0, 0), *((pads[i], after[i]) for i in range(r))], constant_values=fill)
    out = [(x.shape[2 + i] - (dilations[i] * (kernel[i] - 1) + 1)) // strides[i] + 1 for i in range(r)]
    shape = (*x.shape[:2], *out, *kernel)
    steps = (*x.strides[:2], *(x.strides[2 + i] * strides[i] for i in range(r)), *(x.strides[2 + i] * dilations[i] for i in range(r)))
    return np.lib.stride_tricks.as_strided(x, shape, steps, writeable=False)

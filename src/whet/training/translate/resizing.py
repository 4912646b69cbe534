"""Resize in PyTorch with the taps (indices and weights per axis) of the reference, for every coordinate mode."""

from __future__ import annotations

import numpy as np
import torch

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops.resize import make_resampling, resize_targets
from whet.training.translate._base import Compute, Fixed, torch_op


@torch_op("Resize")
def _translate_resize(layer: Layer) -> Compute:
    how = make_resampling(layer)
    if how.coordinates == "tf_crop_and_resize":
        raise UnsupportedError(f"the network cannot be trained: Resize '{layer.name}' crops (tf_crop_and_resize), which has no trainable form here")
    x = layer.needs(0)
    steps: list[tuple[int, list[Fixed], list[Fixed] | None]] = []
    for axis, (out, scale) in enumerate(resize_targets(layer)):
        n = int(x.shape[axis])
        if (out == n and scale in (1, None)) or not isinstance(out, int):
            continue
        index, weights, _ = how.taps(n, out, out / n if scale is None else scale, (0.0, 1.0))
        column = [1] * x.type.rank
        column[axis] = out
        taps = [Fixed(np.ascontiguousarray(index[:, k], np.int64)) for k in range(index.shape[1])]
        shares = None if weights is None else [Fixed(weights[:, k].astype(np.float32).reshape(column)) for k in range(index.shape[1])]
        steps.append((axis, taps, shares))

    def compute(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        for axis, taps, shares in steps:
            parts = [x.index_select(axis, t.like(x, dtype=False)) for t in taps]
            if shares is None:
                x = parts[0]
            else:
                x = sum((p * s.like(x) for p, s in zip(parts[1:], shares[1:], strict=True)), parts[0] * shares[0].like(x))
        return x

    return compute

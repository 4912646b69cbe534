"""Pooling in PyTorch with explicit padding: torch defines ceil mode, dilation and asymmetric pads differently."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from whet.network import Layer
from whet.ops._window import Pool, pool_of
from whet.training.translate._base import Compute, Fixed, torch_op
from whet.training.translate.weighted import to_torch_pads

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _compute_padding(layer: Layer, pool: Pool) -> list[int]:
    r = len(pool.kernel)
    extra = pool.extra(layer.needs(0).shape[2:])
    return to_torch_pads((*pool.pads[:r], *(pool.pads[r + i] + extra[i] for i in range(r))))


def _cut(layer: Layer) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(0, d) for d in layer.output.shape[2:]))


@torch_op("MaxPool")
def _translate_max_pool(layer: Layer) -> Compute:
    pool, where = pool_of(layer), _cut(layer)
    f, around = _MAX[len(pool.kernel)], _compute_padding(layer, pool)
    r = len(pool.kernel)
    half = all(2 * p <= k for p, k in zip(pool.pads[:r], pool.kernel, strict=True))
    if pool.pads[:r] == pool.pads[r:] and half and not any(pool.extra(layer.needs(0).shape[2:])):
        return lambda x: f(x, pool.kernel, pool.strides, pool.pads[:r], pool.dilations)[where]

    def compute(x: torch.Tensor) -> torch.Tensor:
        lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        return f(F.pad(x, around, value=lowest), pool.kernel, pool.strides, 0, pool.dilations)[where]

    return compute


@torch_op("AveragePool")
def _translate_average_pool(layer: Layer) -> Compute:
    pool, where, r = pool_of(layer), _cut(layer), len(pool_of(layer).kernel)
    around = _compute_padding(layer, pool)
    if not any(around) and pool.dilations == (1,) * r:
        return lambda x: _AVERAGE[r](x, pool.kernel, pool.strides)[where]
    counts = Fixed(_count_window_elements(layer, pool))
    if pool.dilations == (1,) * r:
        volume = float(np.prod(pool.kernel))
        return lambda x: _AVERAGE[r](F.pad(x, around), pool.kernel, pool.strides)[where] * volume / counts.like(x)
    ones = Fixed(np.ones((1, 1, *pool.kernel), np.float32))
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[r]

    def compute(x: torch.Tensor) -> torch.Tensor:
        each = F.pad(x, around).reshape(-1, 1, *(n + a for n, a in zip(x.shape[2:], _compute_total_padding(around), strict=True)))
        y = conv(each, ones.like(x), None, pool.strides, 0, pool.dilations)
        return y.reshape(*x.shape[:2], *y.shape[2:])[where] / counts.like(x)

    return compute


def _compute_total_padding(around: list[int]) -> list[int]:
    """Padding per axis, first axis first."""
    return [around[i] + around[i + 1] for i in range(0, len(around), 2)][::-1]


def _count_window_elements(layer: Layer, pool: Pool) -> np.ndarray:
    """Number of elements per window: [1, 1, *out]."""
    x = layer.needs(0)
    ones = np.ones((1, 1, *x.shape[2:]), np.float32)
    if not layer.attrs["count_include_pad"]:
        return np.asarray(sum(pool.slices(ones, 0)), np.float32)
    r = len(pool.kernel)
    whole = Pool(pool.kernel, pool.strides, pool.dilations, (0,) * 2 * r, False)
    ones = np.ones((1, 1, *(n + pool.pads[i] + pool.pads[r + i] for i, n in enumerate(x.shape[2:]))), np.float32)
    ones = np.pad(ones, [(0, 0), (0, 0), *((0, e) for e in pool.extra(x.shape[2:]))])
    cut: Any = (..., *(slice(0, d) for d in layer.output.shape[2:]))
    counts: Any = sum(part[cut] for part in whole.slices(ones, 0))
    return np.asarray(counts, np.float32)


@torch_op("GlobalAveragePool")
def _translate_global_average_pool(layer: Layer) -> Compute:
    axes = tuple(range(2, layer.output.type.rank))
    return lambda x: x.mean(axes, keepdim=True)


@torch_op("GlobalMaxPool")
def _translate_global_max_pool(layer: Layer) -> Compute:
    axes = tuple(range(2, layer.output.type.rank))
    return lambda x: x.amax(axes, keepdim=True)

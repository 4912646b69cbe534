"""Normalizations in PyTorch. A batch norm in training mode updates its running statistics, as torch's own."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from whet.network import Layer
from whet.training.translate._base import Compute, torch_op


@torch_op("BatchNormalization", training=True)
def _translate_batch_norm(layer: Layer) -> Compute:
    """ONNX's momentum is the weight of the old value, torch's the weight of the new one."""
    epsilon, new = layer.attrs["epsilon"], 1 - layer.attrs["momentum"]

    def compute(training: bool, x, scale, bias, mean, variance):
        return F.batch_norm(x, mean, variance, scale, bias, training, new, epsilon)

    return compute


@torch_op("LayerNormalization")
def _translate_layer_norm(layer: Layer) -> Compute:
    x, epsilon = layer.needs(0), layer.attrs["epsilon"]
    over = tuple(x.shape[layer.attrs["axis"] % x.type.rank :])
    if all(t is None or t.shape == over for t in layer.inputs[1:]):
        return lambda x, scale=None, bias=None: F.layer_norm(x, over, scale, bias, epsilon)

    def compute(x: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = F.layer_norm(x, over, eps=epsilon)
        y = y if scale is None else y * scale
        return y if bias is None else y + bias

    return compute


@torch_op("RMSNormalization")
def _translate_rms_norm(layer: Layer) -> Compute:
    x, epsilon = layer.needs(0), layer.attrs["epsilon"]
    axes = tuple(range(layer.attrs["axis"] % x.type.rank, x.type.rank))
    return lambda x, scale: x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale


@torch_op("InstanceNormalization")
def _translate_instance_norm(layer: Layer) -> Compute:
    epsilon = layer.attrs["epsilon"]
    return lambda x, scale, bias: F.instance_norm(x, None, None, scale, bias, True, 0.0, epsilon)


@torch_op("GroupNormalization")
def _translate_group_norm(layer: Layer) -> Compute:
    groups, epsilon = layer.attrs["num_groups"], layer.attrs["epsilon"]
    return lambda x, scale, bias: F.group_norm(x, groups, scale, bias, epsilon)


@torch_op("MeanVarianceNormalization")
def _translate_mean_variance(layer: Layer) -> Compute:
    axes = tuple(layer.attrs["axes"])

    def compute(x: torch.Tensor) -> torch.Tensor:
        d = x - x.mean(axes, keepdim=True)
        return d / (d.square().mean(axes, keepdim=True).sqrt() + 1e-9)

    return compute


@torch_op("LpNormalization")
def _translate_lp_norm(layer: Layer) -> Compute:
    axis, p = layer.attrs["axis"], layer.attrs["p"]
    return lambda x: F.normalize(x, p, axis, 1e-30)


@torch_op("LRN")
def _translate_lrn(layer: Layer) -> Compute:
    a = layer.attrs
    before = (a["size"] - 1) // 2

    def compute(x: torch.Tensor) -> torch.Tensor:
        squares = F.pad(x.square(), (*(0, 0) * (x.ndim - 2), before, a["size"] - 1 - before))
        around = sum(squares[:, i : i + x.shape[1]] for i in range(a["size"]))
        return x / torch.pow(a["bias"] + (a["alpha"] / a["size"]) * around, a["beta"])

    return compute

"""Convolutions and products in PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from whet.network import Layer
from whet.ops import conv as _conv
from whet.ops import conv_transpose as _conv_transpose
from whet.training.translate._base import Compute, torch_op

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def to_torch_pads(pads: tuple[int, ...]) -> list[int]:
    """Converts ONNX pads (begins, then ends) to F.pad order (pairs, last axis first)."""
    r = len(pads) // 2
    return [v for i in reversed(range(r)) for v in (pads[i], pads[r + i])]


@torch_op("Conv")
def _translate_conv(layer: Layer) -> Compute:
    strides, dilations, pads = _conv.get_window_attributes(layer)
    r, group = len(strides), layer.attrs["group"]
    f = _CONV[r]
    if pads[:r] == pads[r:]:
        return lambda x, w, b=None: f(x, w, b, strides, pads[:r], dilations, group)
    around = to_torch_pads(pads)
    return lambda x, w, b=None: f(F.pad(x, around), w, b, strides, 0, dilations, group)


@torch_op("ConvTranspose")
def _translate_conv_transpose(layer: Layer) -> Compute:
    strides, dilations, pads, more = _conv_transpose.get_window_attributes(layer)
    r, group = len(strides), layer.attrs["group"]
    f = _CONV_TRANSPOSE[r]
    if pads[:r] == pads[r:] and all(m < max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)):
        return lambda x, w, b=None: f(x, w, b, strides, pads[:r], more, group, dilations)
    around = [v for i in reversed(range(r)) for v in (-pads[i], more[i] - pads[r + i])]  # output padding minus pads, which crop

    def compute(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        y = F.pad(f(x, w, None, strides, 0, 0, group, dilations), around)
        return y if b is None else y + b.reshape(1, -1, *(1,) * r)

    return compute


@torch_op("Gemm")
def _translate_gemm(layer: Layer) -> Compute:
    a = layer.attrs
    if a["transB"] and not a["transA"] and a["alpha"] == 1 and a["beta"] == 1 and (layer.input(2) is None or layer.needs(2).type.rank == 1):
        return F.linear

    def compute(x: torch.Tensor, w: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        y = a["alpha"] * ((x.T if a["transA"] else x) @ (w.T if a["transB"] else w))
        return y if c is None else y + a["beta"] * c

    return compute


@torch_op("MatMul")
def _translate_matmul(layer: Layer) -> Compute:
    return torch.matmul


@torch_op("Einsum")
def _translate_einsum(layer: Layer) -> Compute:
    equation = layer.attrs["equation"]
    return lambda *xs: torch.einsum(equation, *xs)

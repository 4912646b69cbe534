"""Q/DQ in PyTorch: integers as float numbers, with the straight-through gradient (Bengio et al., arXiv:1308.3432).

After QuantizeLinear a tensor holds integers in f32, so that layers that move values (Reshape, MaxPool, ...) work and gradients pass.
"""

from __future__ import annotations

import torch

from whet.errors import UnsupportedError
from whet.network import Layer
from whet.ops.quantize_linear import LARGEST, get_output_dtype
from whet.training.translate._base import Compute, torch_op


class Rounded(torch.autograd.Function):
    """clamp(round(x / scale) + zero, low, top): the gradient is 1 / scale inside the range and 0 where it saturates."""

    @staticmethod
    def forward(ctx, x, scale, zero, low, top):
        exact = torch.round(x / scale) + zero
        ctx.save_for_backward((exact >= low) & (exact <= top), scale)
        return torch.clamp(exact, low, top)

    @staticmethod
    def backward(ctx, *grads):
        inside, scale = ctx.saved_tensors
        return grads[0] * inside / scale, None, None, None, None


def compute_integer_bounds(bits: int, signed: bool) -> tuple[float, float]:
    """The smallest and largest integer of a type."""
    top = 2 ** (bits - signed) - 1
    return (-top - 1 if signed else 0), top


def fake(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | float = 0.0, *, low: float = -128, top: float = 127) -> torch.Tensor:
    """x quantized and dequantized, straight-through. `scale` broadcasts to x."""
    x = x.float()
    return (Rounded.apply(x, scale, zero, low, top) - zero) * scale


def _broadcast_to_input(layer: Layer, v: torch.Tensor) -> torch.Tensor:
    """Scales or zero points shaped to broadcast over the layer's input."""
    x, axis = layer.needs(0), layer.attrs["axis"]
    if layer.attrs["block_size"]:
        return v.repeat_interleave(layer.attrs["block_size"], axis).narrow(axis, 0, x.shape[axis])
    if v.numel() == 1:
        return v.reshape(())
    column = [1] * x.type.rank
    column[axis] = -1
    return v.reshape(column)


@torch_op("QuantizeLinear")
def _translate_quantize(layer: Layer) -> Compute:
    dtype = get_output_dtype(layer)
    if dtype in LARGEST:
        raise UnsupportedError(f"the network cannot be trained: QuantizeLinear '{layer.name}' makes {dtype}; training knows integers only")
    low, top = compute_integer_bounds(dtype.bits, dtype.kind == "int")

    def compute(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        shift = 0.0 if zero is None else _broadcast_to_input(layer, zero.to(torch.float32))
        return Rounded.apply(x.float(), _broadcast_to_input(layer, scale.float()), shift, low, top)

    return compute


@torch_op("DequantizeLinear")
def _translate_dequantize(layer: Layer) -> Compute:
    def compute(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        y = x.to(scale.dtype)
        return (y if zero is None else y - _broadcast_to_input(layer, zero.to(scale.dtype))) * _broadcast_to_input(layer, scale)

    return compute

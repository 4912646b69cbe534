"""Depthwise convolutions, f32 in blocks of channels: a few pixels of a row stay in registers, also for their activation.

As in pointwise_conv.py, the multiplications are few, and oneDNN's SiLU costs as much as they do.

Measured: docs/notes/cpu_kernels.md, 1.9 times as fast as oneDNN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Config, Packed, Signature, tactic
from whet.tactics._fused import get_root_layer
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._blocked_conv import ConvKernel, ConvTactic, Tile
from whet.tactics.cpu.conv._depthwise_ir import TILES, WHOLE, emit_depthwise_ir
from whet.tactics.cpu.onednn._kernel import to_f32

_WINDOWS = (3, 5, 7)


class DepthwiseKernel(ConvKernel):
    """A planned convolution; its packed operand holds for each block of channels the taps, row by row, and the biases."""

    name, serial_work = "depthwise", 1 << 16

    def launch(self, layer: Layer, signature: Signature, tile: Tile) -> tuple[str | jit.Generated, list[int], int, Packed]:
        head = get_root_layer(layer)
        images, _, rows, columns = static_shape(layer.outputs[0].shape)
        height, width = static_shape(head.needs(0).shape)[2:]
        window, stride, pads = _get_geometry(head)
        sizes = [height, width, rows, columns, tile.groups, *pads[:2], *_compute_inner_columns(layer)]
        weights, bias, key = self.weights, self.bias, f"{self.constants}|depthwise {tile.lanes}"
        nbytes = tile.groups * tile.lanes * (window**2 + 1) * 4
        packed = Packed(key, nbytes, lambda: pack_weights(weights, bias, tile.lanes).view(np.uint8), storable=True)
        row = (width, pads[1]) if tile.pixels == columns <= WHOLE else None
        ir = jit.generate_lazily(emit_depthwise_ir, window, stride, tile.pixels, tile.lanes, self.steps, jit.has("avx512dq"), row)
        return ir, sizes, images * tile.groups * rows, packed


@tactic
class Depthwise(ConvTactic):
    kernel = DepthwiseKernel
    takes_residual = False

    def why_not_conv(self, head: Layer) -> str | None:
        w, a = head.needs(1), head.attrs
        if head.needs(0).type.rank != 4 or w.shape[1] != 1 or a["group"] != w.shape[0]:
            return "takes depthwise convolutions of images"
        window, stride, pads = _get_geometry(head)
        square = len(set(w.shape[2:])) == 1 and len(set(a.get("strides") or (1,))) == 1 and set(a.get("dilations") or (1,)) == {1}
        if not square or window not in _WINDOWS or stride > 2 or max(pads) >= window:
            return "takes square windows of 3, 5 or 7, a stride of 1 or 2, pads smaller than the window"
        return None

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        return None if self.configs(layer, signature, backend) else f"fewer than {TILES[-1]} pixels of a row have all taps within the image"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        columns = static_shape(layer.outputs[0].shape)[3]
        return [(("pixels", p),) for p in ((columns,) if columns <= WHOLE else TILES) if self.fits(layer, signature, 1, p)]

    def tiles(self, layer: Layer, sizes: Mapping[str, int]) -> list[Tile]:
        lanes = get_registers().lanes
        return [Tile(1, sizes["pixels"], -(-static_shape(layer.outputs[0].shape)[1] // lanes), lanes)]

    def fits(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> bool:
        left, right = _compute_inner_columns(layer)
        return pixels == static_shape(layer.outputs[0].shape)[3] <= WHOLE or (pixels in TILES and right - left >= pixels)


def pack_weights(weights: Tensor, bias: Tensor | None, lanes: int) -> np.ndarray:
    """Per block of `lanes` channels: the taps, row by row, then the biases. f32, flat; padding channels are zeros."""
    w = to_f32(weights)
    channels = w.shape[0]
    b = np.zeros(channels, np.float32) if bias is None else to_f32(bias).reshape(channels)
    rows = np.concatenate([w.reshape(channels, -1).T, b[None]])  # [taps + 1, channels]
    rows = np.pad(rows, ((0, 0), (0, -channels % lanes)))
    return np.ascontiguousarray(rows.reshape(len(rows), -1, lanes).transpose(1, 0, 2)).reshape(-1)


def _get_geometry(head: Layer) -> tuple[int, int, tuple[int, ...]]:
    """Window, stride, and pads (top, left, bottom, right)."""
    a = head.attrs
    return int(head.needs(1).shape[2]), int((a.get("strides") or (1,))[0]), tuple(a.get("pads") or (0,) * 4)


def _compute_inner_columns(layer: Layer) -> tuple[int, int]:
    """The range of result columns with every tap inside the image."""
    head = get_root_layer(layer)
    window, stride, pads = _get_geometry(head)
    width, columns = static_shape(head.needs(0).shape)[3], static_shape(layer.outputs[0].shape)[3]
    left = -(-pads[1] // stride)
    return left, max(left, min(columns, (width - window + pads[1]) // stride + 1))

"""Convolutions of images, f32 in blocks of channels: accumulators, SiLU or ReLU and a residual stay in registers.

oneDNN's SiLU takes about thirty instructions for 16 values, this one about fifteen. The ends of rows have separate code, tiles divide the row if
possible, threads share all rows of all channels, each value of a row is read once for all of its taps, and padding channels of the input are skipped.
Layers with few channels gain most.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Config, Operand, Packed, Signature, tactic
from whet.tactics._fused import get_root_layer, get_source_index
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import is_silu, match_chain
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._blocked_conv import ConvKernel, ConvTactic, Tile, block_counts, find_residual, list_launches
from whet.tactics.cpu.conv._direct_ir import MOST, Form, Taps, emit_direct_ir
from whet.tactics.cpu.onednn._kernel import is_static, to_f32

_BLOCKS = range(1, MOST + 1)
_MIN_PIXELS = 4  # pixels of a tile
_TILE_COST = 0.5  # overhead of a tile, in pixels
_WINDOW = 11
_MAX_PLANES = 4  # maximum channels of an image stored plane by plane
_CACHE = 1 << 18  # bytes of weights that stay in L2 together with rows of the image


class DirectKernel(ConvKernel):
    """A planned convolution; packed operands hold weights and biases in groups of a tile's blocks of output channels."""

    name = "direct"

    def launch(self, layer: Layer, signature: Signature, tile: Tile) -> tuple[str | jit.Generated, list[int], int, Packed]:
        head = get_root_layer(layer)
        planes = signature.needs(self.x).format == "linear"
        images, channels, rows, columns = static_shape(layer.outputs[0].shape)
        whole, height, width = static_shape(head.needs(0).shape)[1:]
        taken = static_shape(head.needs(1).shape)[1]
        top, side = _get_pads(head)
        ends = _find_edge_taps(head, columns, tile.pixels)
        assert ends is not None
        unroll = 1 if planes or taken % 2 else 2
        lanes = tile.lanes
        form = Form(
            get_registers(), _get_window(head), _get_strides(head), tile.blocks, tile.pixels, unroll, planes, *ends, self.steps, jit.has("avx512dq")
        )
        nbytes = tile.groups * tile.blocks * lanes * 4 * (prod(form.window) * -(-taken // form.step) * form.step + 1)
        section = max(1, _count_section_blocks(head) // tile.blocks)
        sizes = [height, width, rows, columns, taken, -(-channels // lanes), tile.groups, top, side, int(nbytes <= _CACHE)]
        sizes += [-(-whole // form.step), section]
        weights, bias = self.weights, self.bias
        key = f"{self.constants}|direct {tile.blocks} {lanes} {form.step} {tile.channels}"
        packed = Packed(key, nbytes, lambda: pack_weights(weights, bias, tile, form.step).view(np.uint8), storable=True)
        return jit.generate_lazily(emit_direct_ir, form), sizes, images * tile.groups * rows, packed


@tactic
class Direct(ConvTactic):
    kernel = DirectKernel

    def why_not_conv(self, head: Layer) -> str | None:
        a = head.attrs
        if head.needs(0).type.rank != 4 or set(a.get("dilations") or (1,)) != {1}:
            return "takes convolutions of images, with no dilations"
        lanes, groups = get_registers().lanes, int(a["group"])
        if groups > 1 and (head.needs(1).shape[0] % (lanes * groups) or head.needs(1).shape[1] % lanes):
            return f"takes one group, or groups of whole blocks of {lanes} channels"
        window, pads = _get_window(head), a.get("pads") or (0,) * 4
        is_pointwise = prod(window) == 1 and set(_get_strides(head)) == {1}
        if is_pointwise or max(window) > _WINDOW or any(p >= window[i % 2] for i, p in enumerate(pads)):
            return f"takes windows of more than one pixel or with strides, at most {_WINDOW} a side, and pads smaller than the window"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        x = get_source_index(layer)
        if static_shape(get_root_layer(layer).needs(0).shape)[1] > _MAX_PLANES or x == find_residual(layer):
            return super().signatures(layer, backend)
        planes = Operand("linear", get_registers().stored.dtype)
        return [replace(s, inputs=(*s.inputs[:x], planes, *s.inputs[x + 1 :])) for s in super().signatures(layer, backend)]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if reason := self.unavailable():
            return reason
        return None if self.configs(layer, signature, backend) else f"no tile of at least {_MIN_PIXELS} pixels fits the rows"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        """With SiLU, which gains most: for each number of blocks (one only if no other is possible) the tile that recomputes fewest pixels, with and
        without registers for the weights of all taps of a row. Else the tile of lowest cost. In place no pixel may be computed twice."""
        (_, channels, _, columns), wide = static_shape(layer.outputs[0].shape), _get_window(get_root_layer(layer))[1]
        registers = get_registers()
        blocks = -(-channels // registers.lanes)
        fit = {b: [p for p in range(_MIN_PIXELS, registers.count) if self.fits(layer, signature, b, p)] for b in _BLOCKS}
        some = [b for b in _BLOCKS if fit[b]]
        tiles = [(b, p) for b in block_counts(blocks, some) if not blocks % b or fit.get(blocks % b) for p in fit[b]]
        tiles = tiles or [(1, p) for p in fit[1]]
        chain = match_chain(layer)
        if isinstance(chain, str) or not any(map(is_silu, chain.steps)):
            best = min(tiles, key=lambda t: self.cost(layer, signature, *t), default=None)
            return [] if best is None else [self.config(layer, signature, *best)]
        configs = []
        for b in sorted({b for b, _ in tiles}):
            for beside in (wide, 1):
                few = [p for p in fit[b] if b * (p + beside) < registers.count]
                if few:
                    configs.append(self.config(layer, signature, b, min(few, key=lambda p: -(-columns // p) * (p + _TILE_COST))))
        return list(dict.fromkeys(configs))

    def config(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> Config:
        """With the tile of lowest cost for the remaining blocks."""
        registers = get_registers()
        left = -(-static_shape(layer.outputs[0].shape)[1] // registers.lanes) % blocks
        rest = [p for p in range(_MIN_PIXELS, registers.count) if left and self.fits(layer, signature, left, p)]
        main = (("blocks", blocks), ("pixels", pixels))
        return (*main, ("rest", min(rest, key=lambda p: _estimate_cost(layer, left, p)))) if left else main

    def cost(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> float:
        """Estimated cost of all channels."""
        sizes = {name: int(value) for name, value in self.config(layer, signature, blocks, pixels)}
        return sum(t.groups * t.blocks * _estimate_cost(layer, t.blocks, t.pixels) for t in list_launches(layer, sizes) or ())

    def fits(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> bool:
        columns = static_shape(layer.outputs[0].shape)[3]
        if blocks not in _BLOCKS or not _MIN_PIXELS <= pixels <= columns or blocks * (pixels + 1) >= get_registers().count:
            return False
        head = get_root_layer(layer)
        if head.attrs["group"] > 1 and _count_section_blocks(head) % blocks:
            return False
        return not (signature.inplace and columns % pixels) and _find_edge_taps(head, columns, pixels) is not None


def pack_weights(weights: Tensor, bias: Tensor | None, tile: Tile, step: int) -> np.ndarray:
    """Per group of the tile's blocks of output channels: for each `step` input channels, row of the window, input channel and tap of the row the
    group's weights; then its biases. f32, flat; padding channels are zeros."""
    w = to_f32(weights)[tile.channels]
    channels, taken, high, wide = w.shape
    group, groups, parts = tile.blocks * tile.lanes, tile.groups, -(-taken // step)
    full = np.zeros((groups * group, parts * step, high, wide), np.float32)
    full[:channels, :taken] = w
    biases = np.zeros(groups * group, np.float32)
    if bias is not None:
        biases[:channels] = to_f32(bias).reshape(-1)[tile.channels]
    rows = full.reshape(groups, group, parts, step, high, wide).transpose(0, 2, 4, 3, 5, 1).reshape(groups, -1)
    return np.concatenate([rows, biases.reshape(groups, group)], axis=1).reshape(-1)


def _count_section_blocks(head: Layer) -> int:
    """Blocks of output channels that read the same input channels."""
    return -(-static_shape(head.needs(1).shape)[0] // int(head.attrs["group"]) // get_registers().lanes)


def _get_window(head: Layer) -> tuple[int, int]:
    high, wide = static_shape(head.needs(1).shape)[2:]
    return high, wide


def _get_strides(head: Layer) -> tuple[int, int]:
    down, across = head.attrs.get("strides") or (1, 1)
    return int(down), int(across)


def _get_pads(head: Layer) -> tuple[int, int]:
    """Top and left."""
    top, side = (head.attrs.get("pads") or (0, 0))[:2]
    return int(top), int(side)


def _estimate_cost(layer: Layer, blocks: int, pixels: int) -> float:
    """Multiplications and loads of a block of output channels, for an input channel and a row of taps. Ranks tiles like their times (ResNets)."""
    head = get_root_layer(layer)
    wide, across, columns = _get_window(head)[1], _get_strides(head)[1], static_shape(layer.outputs[0].shape)[3]
    shared = blocks * (pixels + wide) < get_registers().count
    spread = (pixels - 1) * across + wide if shared else pixels * wide
    return -(-columns // pixels) * (blocks * pixels * wide + blocks * wide + spread) / blocks


def _find_edge_taps(head: Layer, columns: int, pixels: int) -> tuple[Taps, Taps | None] | None:
    """The taps within the image of a row's first and last tile (None: the same one); None if another tile has taps outside the image."""
    wide, across, side = _get_window(head)[1], _get_strides(head)[1], _get_pads(head)[1]
    width = static_shape(head.needs(0).shape)[3]

    def list_taps(start: int) -> Taps:
        """For each tap, the range of pixels of the tile at column `start` with the tap inside the image."""
        firsts = [start * across - side + s for s in range(wide)]
        bounds = [(max(0, -(f // across)), min(pixels, (width - 1 - f) // across + 1)) for f in firsts]
        return tuple((low, max(low, high)) for low, high in bounds)

    if any(list_taps(q) != ((0, pixels),) * wide for q in range(pixels, columns - pixels, pixels)):
        return None
    return list_taps(0), None if columns == pixels else list_taps(columns - pixels)

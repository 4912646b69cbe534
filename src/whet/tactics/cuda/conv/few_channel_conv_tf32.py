"""Convolutions of 32 or 64 channels of f32 tensors in TF32 by image tiles (few_channel_tf32.cu); `--noTF32` forbids it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer
from whet.tactics._base import Args, Config, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, FloatPointer, Int32, TensorMap
from whet.tactics.cuda._device.kernel import ACTIVATIONS, GpuKernel, compile_ahead, launch, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import ConvShape, PostOps
from whet.tactics.cuda.conv._conv_config import REGISTERS, SHARED_LIMIT
from whet.tactics.cuda.conv._tf32 import count_padded_filters, cut_to_tf32, permute_by_16, read_config_fields
from whet.tactics.cuda.conv._tf32_tactic import F32Product
from whet.tactics.cuda.conv.conv import get_conv_shape, make_packed_bias
from whet.tactics.cuda.conv.conv_tf32 import ConvTf32

_TILES = ((8, 8), (8, 16), (16, 8), (16, 16), (8, 32), (16, 32))  # rows and columns of a warpgroup's results
_MOST = 12  # configurations


@dataclass(frozen=True)
class FewChannelTf32Arguments(Arguments, kernel="few_channel_tf32.cu"):
    input: TensorMap  # [n][h][w / STRIDE_W][STRIDE_W * C], boxes of 32 x COLUMNS x ROWS x 1; [k][STEPS * 32], boxes of 32 x BN
    weights: TensorMap
    bias: ConstFloatPointer  # whole tiles of BN
    residual: ConstFloatPointer
    out: FloatPointer
    p: Int32
    q: Int32
    k: Int32
    pad_h: Int32
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32
    tiles_n: Int32
    act: ActivationParameters


@dataclass(frozen=True, order=True)
class FewChannelTile:
    """One instance of few_channel_tf32.cu: rows and columns of a warpgroup's tile, output channels, warpgroups of a block, resident blocks."""

    th: int
    tw: int
    bn: int
    groups: int
    blocks: int

    @property
    def config(self) -> Config:
        """The engine's record of the configuration."""
        return (("th", self.th), ("tw", self.tw), ("bn", self.bn), ("groups", self.groups), ("blocks", self.blocks), ("math", "tf32"))

    @staticmethod
    def of(config: Config) -> FewChannelTile:
        """The instance that an engine names."""
        return FewChannelTile(**read_config_fields(config))

    def constants(self, s: ConvShape, post_ops: PostOps) -> dict[str, int]:
        """The macros of the instance."""
        own = {"TH": self.th, "TW": self.tw, "BN": self.bn, "GROUPS": self.groups, "BLOCKS": self.blocks, "TERMS": 1}
        shape = {"C": s.c, "R": s.r, "S": s.s, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "PAD_W": s.pad[1]}
        return {**own, **shape, "ACT": ACTIVATIONS[post_ops.activation[0]], "RESIDUAL": post_ops.residual}

    def box(self, s: ConvShape) -> tuple[int, int]:
        """Columns and rows of an image tile, of one phase; mirrors few_channel_tf32.cu."""
        step = s.stride[1]
        return self.tw + -(-s.pad[1] // step) + max(s.s - 1 - s.pad[1], 0) // step, (self.th - 1) * s.stride[0] + s.r

    def shared(self, s: ConvShape) -> int:
        """Bytes of shared memory; mirrors few_channel_tf32.cu."""
        wide, tall = self.box(s)
        piece = s.c // 32 * s.stride[1] * (-(-wide * tall // 8) * 1024)
        return 1024 + s.r * s.s * s.c * self.bn * 4 + self.groups * piece + self.bn * 4 + 8 + self.groups * 8

    def why_not(self, s: ConvShape) -> str | None:
        """Why a multiprocessor cannot hold it, or None."""
        registers = self.bn + 40  # accumulators, a residual, addresses
        large = max(self.box(s)) > 256 or self.blocks * self.groups * 128 * registers > REGISTERS or self.groups > 8
        if large or self.blocks * (self.shared(s) + 1024) > SHARED_LIMIT + 1024:
            return f"a multiprocessor cannot hold {self.blocks} blocks of {self}"
        return None

    def estimate_us(self, s: ConvShape, multiprocessors: int) -> float:
        """A rough time in us on an H200, which only orders candidates."""
        wide, tall = self.box(s)
        tiles = s.n * -(-s.p // self.th) * -(-s.q // self.tw) * -(-s.k // self.bn)
        at_once = self.blocks * self.groups
        turns = -(-tiles // (multiprocessors * at_once))
        piece = wide * tall * s.stride[1] * s.c * 4
        results = self.th * self.tw * self.bn
        work = max((piece + results * 4) / 40e3, results / 64 / self.bn * s.r * s.s * s.c / 8 * max(24, self.bn / 2 + 16) / 1.75e3)
        return s.r * s.s * s.c * self.bn * 4 / 80e3 + turns * (at_once * work + 2.0)

    def __str__(self) -> str:
        return f"{self.th}x{self.tw}x{self.bn} g{self.groups} b{self.blocks}"


@tactic
class FewChannelConvTf32(F32Product):
    """One group, filters of several taps, strides up to 2, no dilation; a multiple of 4 output channels."""

    ops = ("Conv",)
    rtol = ConvTf32.rtol

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if get_root_layer(layer).attrs["group"] != 1 or s.c not in (32, 64) or s.w % s.stride[1]:
            return f"{s.c} channels, {s.w} pixels per row; takes one group of 32 or 64 channels and rows of a multiple of the stride"
        if s.k % 4 or s.k > 256 or s.dilation != (1, 1) or not 1 < s.r * s.s <= 49 or max(s.stride) > 2:
            sizes = f"{s.k} output channels, filter {s.r} x {s.s}, strides {s.stride}"
            return f"{sizes}; takes a multiple of 4 up to 256, 2 to 49 taps, strides up to 2 and no dilation"
        return None if any(t.why_not(s) is None for t in _list_tiles(s)) else "the weights and an image tile exceed shared memory"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        s, epilogue = get_conv_shape(layer), match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(epilogue, str):
            return []
        able = [t for t in _list_tiles(s) if t.why_not(s) is None]
        configs = sorted(able, key=lambda t: (t.estimate_us(s, backend.capabilities.multiprocessors), t))[:_MOST]
        compile_ahead(backend, [emit_kernel_source("few_channel_tf32.cu", t.constants(s, epilogue.post_ops)) for t in configs])
        return [t.config for t in configs]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue, s, tile = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer), FewChannelTile.of(config)
        if isinstance(epilogue, str) or tile.why_not(s):
            raise PlanRefused(epilogue if isinstance(epilogue, str) else f"a multiprocessor cannot hold {tile}")
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        constants, row = tile.constants(s, epilogue.post_ops), s.r * s.s * s.c
        tiles_h, tiles_w, tiles_n = -(-s.p // tile.th), -(-s.q // tile.tw), -(-s.k // tile.bn)
        tiles = s.n * tiles_h * tiles_w

        def make(args: Args) -> list:
            step, line = s.stride[1], s.w * s.c * 4
            pixels = tensormap.make_tiled_map(
                args.inputs[x], "f32", (step * s.c, s.w // step, s.h, s.n), (step * s.c * 4, line, line * s.h), (32, *tile.box(s), 1)
            )
            filter_rows = tensormap.make_tiled_map(args.packed[0], "f32", (row, count_padded_filters(s.k)), (row * 4,), (32, tile.bn))
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            sizes = (s.p, s.q, s.k, s.pad[0], tiles_h, tiles_w, tiles, tiles_n)
            addresses = (args.packed[1], residual, args.outputs[0])
            arguments = FewChannelTf32Arguments(pixels, filter_rows, *addresses, *sizes, act=epilogue.post_ops.activation[1:])
            grid = max(1, min(-(-tiles // tile.groups), backend.capabilities.multiprocessors * tile.blocks // tiles_n)) * tiles_n
            return [launch("few_channel_tf32", arguments, constants, (grid, 1, 1), tile.groups * 128, shared=tile.shared(s), label=layer.name)]

        def rows() -> np.ndarray:
            out = np.zeros((count_padded_filters(s.k), row), np.float32)
            out[: s.k] = np.asarray(weights.array(), np.float32).transpose(0, 2, 3, 1).reshape(s.k, -1)
            return permute_by_16(cut_to_tf32(out))

        packed = (
            make_packed_array(f"{weights.constant().digest}|narrow tf32", count_padded_filters(s.k) * row * 4, rows),
            make_packed_bias(epilogue, own, s.k),
        )
        return GpuKernel(layer, signature, make, implementation=f"narrow wgmma tf32 {tile}", packed=packed, rtol=self.rtol)


def _list_tiles(s: ConvShape) -> list[FewChannelTile]:
    """Of each tile, and width of output channels, as many warpgroups as fit, and one fewer."""
    widths = dict.fromkeys((min(64, count_padded_filters(s.k)), min(32, count_padded_filters(s.k))))
    tiles: list[FewChannelTile] = []
    for th, tw in _TILES:
        for bn in widths:
            for blocks in (1, 2, 3):
                fit = [t for t in (FewChannelTile(th, tw, bn, groups, blocks) for groups in (8, 6, 5, 4, 3, 2, 1)) if t.why_not(s) is None]
                tiles += fit[:2]
    return tiles

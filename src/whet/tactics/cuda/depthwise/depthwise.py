"""Depthwise convolution, channels last: by tiles in shared memory, or straight from memory; bias, residual and activation fused."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from whet.backends import Backend
from whet.backends.cuda.launch import MAX_SHARED
from whet.network import Layer
from whet.network.types import BF16, F16, F32
from whet.tactics._base import Args, Config, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Float32, Int32, Pointer, UInt32
from whet.tactics.cuda._device.kernel import (
    ACTIVATIONS,
    TYPE,
    GpuKernel,
    all_static,
    compile_ahead,
    count_blocks,
    launch,
    machine_has,
    make_packed_array,
    match_epilogue,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import NONE, ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape, list_conv_signatures, make_packed_bias, why_not_conv
from whet.tactics.cuda.depthwise._depthwise_tile import Tile, list_tiles, tile_launch
from whet.tactics.cuda.depthwise._depthwise_tile import make_constants as tile_constants
from whet.tactics.cuda.depthwise._depthwise_tile import refuses as no_tile


@dataclass(frozen=True)
class DepthwiseArguments(Arguments, kernel="depthwise.cu"):
    input: ConstPointer
    weights: ConstFloatPointer
    bias: ConstFloatPointer
    residual: ConstPointer
    out: Pointer
    n: Int32
    h: Int32
    w: Int32
    c: Int32
    p: Int32
    q: Int32
    stride_h: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    has_residual: Int32  # 1: added before the activation, 2: after it
    act: ActivationParameters
    fill: UInt32 = 0
    per_step: Float32 = 1.0
    zero: Float32 = 0.0


@tactic
class Depthwise(Tactic):
    """As many groups as channels, one filter each; kernels up to 7 x 7, of 16-bit floats up to 9 x 9."""

    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        head = get_root_layer(layer)
        if reason := super().why_not(layer) or why_not_conv(layer, head):
            return reason
        w = head.needs(1)
        return None if w.shape[1] == 1 and head.attrs["group"] == w.shape[0] else "takes depthwise convolutions"

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not all_static(layer):
            return []
        return list_conv_signatures(layer, "nhwc", (F16, BF16, F32))

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if s.c % 8:
            return f"{s.c} channels; takes a multiple of 8"
        if s.m * s.c // 8 >= 2**31:
            return "more than 2**31 groups of eight values"
        if max(s.r, s.s) > 7 and not _tiles_fit(layer, signature, s, backend):
            return "takes filters up to 7 x 7; of 16-bit floats without a residual and dilation up to 81 taps"
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        s = get_conv_shape(layer)
        configs: list[Config] = _list_tile_configs(layer, signature, s, backend)
        if max(s.r, s.s) > 7:
            return configs
        for wide, tall in ((1, 1), (2, 1), (4, 1), (1, 4), (2, 4), (2, 8)):
            threads = s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8)
            large = s.r * s.s > 9 and (tall > 1 or wide > 2)  # would not fit the registers
            if not large and (tall == 1 or threads >= 256 * backend.capabilities.multiprocessors):
                configs.append((("wide", wide), ("tall", tall)))
                compile_ahead(backend, [emit_kernel_source("depthwise.cu", _make_constants(layer, signature, wide, tall))])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        s, wide, tall = get_conv_shape(layer), int(dict(config)["wide"]), int(dict(config).get("tall", 0))
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        kind, low, high = epilogue.post_ops.activation
        constants = _make_constants(layer, signature, wide, tall)
        packed = (
            make_packed_array(
                f"{weights.constant().digest}|depthwise rsc f32",
                s.r * s.s * s.c * 4,
                lambda: np.asarray(weights.array(), np.float32).reshape(s.c, s.r * s.s).T,
            ),
            make_packed_bias(epilogue, own, s.c),
        )
        if not tall:
            tile = tile_from(config, s, 2)
            text = tile_constants(s, tile, constants["FROM"], constants["TO"], kind)

            def make_tile_launch(args: Args) -> list:
                addresses = (args.inputs[x], args.packed[0], args.packed[1], args.outputs[0])
                return [tile_launch(s, tile, text, addresses, (low, high), (1.0, 0.0), backend.capabilities.multiprocessors, layer.name)]

            return GpuKernel(layer, signature, make_tile_launch, implementation=f"depthwise tile {tile}", packed=packed)
        grid = (count_blocks(s.n * -(-s.p // tall) * -(-s.q // wide) * (s.c // 8), 128), 1, 1)

        def make(args: Args) -> list:
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            addresses = (args.inputs[x], args.packed[0], args.packed[1], residual, args.outputs[0])
            sizes = (s.n, s.h, s.w, s.c, s.p, s.q, s.stride[0], s.pad[0], s.pad[1], *s.dilation, epilogue.post_ops.residual)
            return [launch("depthwise", DepthwiseArguments(*addresses, *sizes, act=(low, high)), constants, grid, 128)]

        return GpuKernel(layer, signature, make, implementation=f"depthwise {tall}x{wide}", packed=packed)


def _make_constants(layer: Layer, signature: Signature, wide: int, tall: int) -> dict[str, int]:
    """Macros of depthwise.cu."""
    s, dtype, epilogue = get_conv_shape(layer), TYPE[signature.outputs[0].dtype.name], match_epilogue(layer, find_epilogue_steps(layer))
    kind = NONE[0] if isinstance(epilogue, str) else epilogue.post_ops.activation[0]
    return {"FROM": dtype, "TO": dtype, "R": s.r, "S": s.s, "STRIDE": s.stride[1], "WIDE": wide, "TALL": tall, "ACT": ACTIVATIONS[kind]}


def _tiles_fit(layer: Layer, signature: Signature, s: ConvShape, backend: Backend) -> bool:
    """True if the tile kernel takes the layer: 16-bit types, no residual, filters that fit the registers."""
    epilogue = match_epilogue(layer, find_epilogue_steps(layer))
    if isinstance(epilogue, str) or epilogue.residual is not None or signature.outputs[0].dtype == F32:
        return False
    return no_tile(s, 2) is None and machine_has(backend, "tma") and bool(list_tiles(s, 2, backend.capabilities.multiprocessors))


def _list_tile_configs(layer: Layer, signature: Signature, s: ConvShape, backend: Backend) -> list[Config]:
    """Configurations of the tile kernel, where it has enough work to do: large filters, or enough values to fill the tiles. With filters of more
    than 9 taps the other kernel reads much more than the image, so that tiles win earlier; then only the most promising ones are candidates."""
    epilogue, kind = match_epilogue(layer, find_epilogue_steps(layer)), TYPE[signature.outputs[0].dtype.name]
    if isinstance(epilogue, str) or not _tiles_fit(layer, signature, s, backend):
        return []
    each, few = s.m * s.c / backend.capabilities.multiprocessors, 8192  # values; below `few` latency counts, not bytes
    if each < (few if s.r * s.s <= 9 else few / 8) and s.r * s.s <= 25:
        return []
    tiles = list_tiles(s, 2, backend.capabilities.multiprocessors)
    if each < few and s.r * s.s <= 25:
        tiles = tiles[:4]
    compile_ahead(
        backend, [emit_kernel_source("depthwise_tile.cu", tile_constants(s, t, kind, kind, epilogue.post_ops.activation[0])) for t in tiles]
    )
    return [tile_config(t) for t in tiles]


def tile_config(t: Tile) -> Config:
    """A tile as a tactic's config."""
    return tuple((k, v) for k, v in asdict(t).items() if (k, v) != ("vec", 4))


def tile_from(config: Config, s: ConvShape, size: int) -> Tile:
    """The tile of a config for inputs of `size` bytes. Raises PlanRefused for one that the kernel or the hardware cannot take."""
    tile, reason = Tile(**{k: int(v) for k, v in config}), no_tile(s, size)
    if reason or tile.shared(s, size) > MAX_SHARED or s.c % tile.cg or tile.tw % tile.wide:
        raise PlanRefused(reason or f"a multiprocessor cannot hold {tile}")
    return tile

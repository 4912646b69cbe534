"""Stem convolutions that read the image directly, on tensor cores: no copy with padded channels, weights in shared memory, any float input.

The general kernel for at most 4 input channels (any stride). Separate from `stem_as_channels` because that one's copy of the image costs more
than the convolution: 148 us instead of 411 for 128 images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer, Tensor
from whet.network.types import F32, DType
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_source_index, get_weight_and_bias
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstPointer,
    Fields,
    Float32,
    Int32,
    Pointer,
    TensorMap,
    When,
)
from whet.tactics.cuda._device.kernel import ACTIVATIONS, RTOL, GpuKernel, compile_ahead, launch, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import TYPES, ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape, make_packed_bias
from whet.tactics.cuda.stem.stem_as_channels import FirstLayer

TILES = ((8, 16), (4, 16), (8, 32), (16, 16), (4, 32))  # output rows and columns of a block


@dataclass(frozen=True)
class PooledFields(Fields):
    """Size of the result of a following max pooling."""

    pool_p: Int32
    pool_q: Int32


@dataclass(frozen=True)
class StemSizes(Fields):
    """Sizes of the convolution, and the number of tiles down an image, across it, and in total."""

    n: Int32
    h: Int32
    w: Int32
    p: Int32
    q: Int32
    k: Int32
    pad_h: Int32
    pad_w: Int32
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32

    @classmethod
    def of(cls, s: ConvShape, tiles_h: int, tiles_w: int) -> StemSizes:
        """The sizes of a shape with this number of tiles per image."""
        return cls(s.n, s.h, s.w, s.p, s.q, s.k, s.pad[0], s.pad[1], tiles_h, tiles_w, s.n * tiles_h * tiles_w)


@dataclass(frozen=True)
class StemArguments(Arguments, kernel="stem.cu"):
    weights: TensorMap  # [k][CHUNKS * 64], boxes of 64 x BN
    bias: ConstFloatPointer
    input: ConstPointer
    out: Pointer
    sizes: StemSizes
    act: ActivationParameters
    per_step: Float32 = 1.0
    zero: Float32 = 0.0
    in_zero: Int32 = 0
    factor: ConstFloatPointer = 0
    pooled: Annotated[PooledFields | None, When("POOL")] = None
    image_per_step: Annotated[Float32 | None, When("QUANT")] = None


@tactic
class Stem(FirstLayer):
    """Up to 4 input channels, filter rows up to 16 taps, up to 128 output channels, no dilation."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        epilogue, s = match_epilogue(layer, find_epilogue_steps(layer)), get_conv_shape(layer)
        if isinstance(epilogue, str):
            return epilogue
        if s.c > 4 or s.k > 128 or s.k % 8 or s.s > 16 or s.r > 16:
            return f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}; takes 4, a multiple of 8 up to 128, 16 x 16"
        return "takes no dilation" if s.dilation != (1, 1) else None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        s = get_conv_shape(layer)
        configs: list[Config] = []
        for th, tw in TILES:
            for blocks in (1, 2, 3, 4):
                threads = th * tw * 2
                pixels = -(-((th - 1) * s.stride[0] + s.r) * ((tw - 1) * s.stride[1] + count_float_taps(s)) // threads) * s.c
                registers = _count_columns(s) * 3 // 4 + pixels + 30  # accumulators and biases, the next pixels, fragments and addresses
                if (
                    blocks * threads <= 1024
                    and registers <= 65536 // (blocks * threads)
                    and count_shared_bytes(s, th, tw, count_float_taps(s)) * blocks < 220 * 1024
                ):
                    configs.append((("th", th), ("tw", tw), ("blocks", blocks)))
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        source = signature.inputs[get_source_index(layer)]
        if not isinstance(epilogue, str):
            kind, dtype = epilogue.post_ops.activation[0], signature.outputs[0].dtype.name
            compile_ahead(backend, [text("stem.cu", make_stem_constants(s, {k: int(v) for k, v in c}, kind, source, dtype)) for c in configs])
        return configs

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        epilogue = match_epilogue(layer, find_epilogue_steps(layer))
        if isinstance(epilogue, str):
            raise PlanRefused(epilogue)
        s, tile = get_conv_shape(layer), {k: int(v) for k, v in config}
        x = get_source_index(layer)
        weights, own = get_weight_and_bias(layer)
        source, dtype = signature.inputs[x], signature.outputs[0].dtype
        assert source is not None
        assert weights is not None
        row = count_row_elements(s)
        packed = (pack_stem_filters(s, weights, dtype), make_packed_bias(epilogue, own, s.k))
        constants = make_stem_constants(s, tile, epilogue.post_ops.activation[0], source, dtype.name)
        tiles_h, tiles_w = -(-s.p // tile["th"]), -(-s.q // tile["tw"])
        tiles = s.n * tiles_h * tiles_w

        def make(args: Args) -> list:
            shared = count_shared_bytes(s, tile["th"], tile["tw"], count_float_taps(s))
            box = tensormap.make_tiled_map(args.packed[0], dtype.name, (row, s.k), (row * 2,), (64, constants["BN"]))
            arguments = StemArguments(
                box, args.packed[1], args.inputs[x], args.outputs[0], StemSizes.of(s, tiles_h, tiles_w), act=epilogue.post_ops.activation[1:]
            )
            grid = min(tiles, backend.capabilities.multiprocessors * tile["blocks"])
            return [launch("stem", arguments, constants, (grid, 1, 1), tile["th"] * tile["tw"] * 2, shared=shared, label=layer.name)]

        rtol = RTOL[dtype.name] * (1.5 if source.dtype == F32 else 1)  # the image is rounded as well
        name = f"first wgmma {tile['th']}x{tile['tw']} b{tile['blocks']}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=rtol)


def count_row_elements(s: ConvShape) -> int:
    """Elements of a packed filter of floats: whole rows of 64."""
    return _count_chunks(s, count_float_taps(s)) * 64


def pack_stem_filters(s: ConvShape, weights: Tensor, dtype: DType) -> Packed:
    """Filters of floats as stem.cu reads them: rows of taps of four channels."""
    taps = count_float_taps(s)

    def make_filters() -> np.ndarray:
        given = np.asarray(weights.array(), np.float32)  # [k, c, r, s]
        side = np.zeros((s.k, s.r, taps, 4), np.float32)
        side[:, :, : s.s, : s.c] = given.transpose(0, 2, 3, 1)
        out = np.zeros((s.k, count_row_elements(s)), dtype.numpy)
        out[:, : side[0].size] = side.reshape(s.k, -1)
        return out

    return make_packed_array(
        f"{weights.constant().digest}|first {taps} {count_row_elements(s)} {dtype}", s.k * count_row_elements(s) * 2, make_filters
    )


def make_stem_constants(s: ConvShape, tile: dict[str, int], activation: str, source: Any, dtype: str) -> dict[str, int]:
    """The macros of an instance for floats."""
    taps = count_float_taps(s)
    even = s.stride[1] % 2 == 0 and s.w % 2 == 0 and s.pad[1] % 2 == 0 and taps % 2 == 0  # tiles, filter rows and image rows begin at even pixels
    return {
        "C": s.c,
        "R": s.r,
        "TAPS": taps,
        "STRIDE_H": s.stride[0],
        "STRIDE_W": s.stride[1],
        "TH": tile["th"],
        "TW": tile["tw"],
        "BLOCKS": tile["blocks"],
        "BN": _count_columns(s),
        "FROM": TYPES[source.dtype.name],
        "NHWC": int(source.format == "nhwc"),
        "PAIRS": int(even and source.dtype == F32 and source.format != "nhwc"),
        "ACT": ACTIVATIONS[activation],
        "BF16": int(dtype == "bf16"),
        "TO": 0,
        "FOLD": 0,
        "IN8": 0,
    }


def count_float_taps(s: ConvShape) -> int:
    """Taps of a float filter row, padded to a multiple of 2 if all rows together are then a multiple of 4, else of 4: a step has 16 elements."""
    twos = -(-s.s // 2) * 2
    return twos if s.r * twos % 4 == 0 else count_integer_taps(s)


def count_integer_taps(s: ConvShape) -> int:
    """Taps of a filter row, padded to a multiple of 4: 16 elements of K."""
    return -(-s.s // 4) * 4


def _count_columns(s: ConvShape) -> int:
    return -(-s.k // 16) * 16


def _count_chunks(s: ConvShape, taps: int) -> int:
    """Rows of 64 elements of K."""
    return -(-s.r * taps // 16)


def count_shared_bytes(s: ConvShape, th: int, tw: int, taps: int) -> int:
    """Bytes of shared memory; mirrors stem.cu."""
    patch = ((th - 1) * s.stride[0] + s.r) * ((tw - 1) * s.stride[1] + taps) * 8
    return 1024 + _count_chunks(s, taps) * _count_columns(s) * 128 + patch + 32

"""Quantized convolutions of 32 or 64 channels and several taps: an image tile is loaded once, weights stay in registers as operand A."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from whet.backends import Backend
from whet.backends.cuda import tensormap
from whet.network import Layer
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, tactic
from whet.tactics._quantized import Parts
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstPointer,
    Float32,
    Int32,
    Pointer,
    TensorMap,
    UInt32,
)
from whet.tactics.cuda._device.kernel import ACTIVATIONS, Epilogue, GpuKernel, compile_ahead, machine_has, make_packed_array
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import TYPES, ConvShape
from whet.tactics.cuda.conv._weights_as_a import THREADS, WeightFields, fits_multiprocessor, list_tile_widths, make_launches, pack_for_registers
from whet.tactics.cuda.quantized._quantized import (
    INT8_TYPES,
    folds,
    get_quantized_conv_shape,
    get_weight_bytes,
    match_parts,
    match_quantized_epilogue,
    why_not_weighted,
)
from whet.tactics.cuda.quantized._quantized_tactic import QuantizedTactic
from whet.tactics.cuda.stem.qstem import make_stem_factors

_MOST_TAPS = 16


@dataclass(frozen=True)
class QConvFewChannelArguments(Arguments, kernel="qconv_few_channel.cu"):
    image: TensorMap  # boxes of C bytes x COLUMNS x ROWS; with a stride of 2 pairs of columns are one of twice the bytes
    weights: WeightFields
    residual: ConstPointer
    out: Pointer
    h: Int32  # of the image, and of a slice of it
    columns: Int32
    store_p: Int32  # of the stored result
    store_q: Int32
    tiles_y: Int32
    tiles_x: Int32
    tiles: Int32
    act: ActivationParameters
    per_step: Float32
    zero: Float32
    add_step: Float32
    outside: UInt32  # four zero points


@tactic
class QConvFewChannel(QuantizedTactic):
    """One group, strides of 1 or 2, no dilation; as many columns as the stride divides; integers out, a residual of integers."""

    ops = ("Conv",)

    def why_not_parts(self, layer: Layer, parts: Parts) -> str | None:
        if parts.head.attrs["group"] != 1 or parts.head.needs(0).type.rank != 4:
            return "takes convolutions of two spatial axes and one group"
        if parts.stores is None or parts.stores.dtype.name not in INT8_TYPES:
            return "stores integers"
        epilogue = match_quantized_epilogue(parts)
        if isinstance(epilogue, str):
            return epilogue
        if not folds(epilogue, parts.stores.dtype.name):
            return "takes a Clip or SiLU"
        if epilogue.residual is not None and (epilogue.residual not in parts.reads or parts.reads[epilogue.residual].dtype.name not in INT8_TYPES):
            return "adds integers"
        return why_not_weighted(parts)

    def list_signatures(self, layer: Layer, parts: Parts) -> list[Signature]:
        epilogue, stores = match_quantized_epilogue(parts), parts.stores
        assert not isinstance(epilogue, str)
        assert stores is not None
        given = {i: Operand("nhwc", parts.reads[i].dtype) for i in (parts.source_index(), epilogue.residual) if i is not None}
        return [Signature(tuple(given.get(i) for i in range(len(layer.inputs))), (Operand("nhwc", stores.dtype),))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        parts = match_parts(layer)
        return parts if isinstance(parts, str) else why_not_few_channel_integer(get_quantized_conv_shape(parts))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        parts = match_parts(layer)
        assert isinstance(parts, Parts)
        epilogue = match_quantized_epilogue(parts)
        assert not isinstance(epilogue, str)
        fit = [t for t in list_integer_tiles(get_quantized_conv_shape(parts)) if t.fits(epilogue.residual is not None)]
        good = [t for t in fit if replace(t, blocks=t.blocks + 2) not in fit]  # as many blocks as fit, and one less
        compile_ahead(backend, [text("qconv_few_channel.cu", t.constants(parts, epilogue)) for t in good])
        return [(("wide", t.wide), ("tall", t.tall), ("blocks", t.blocks)) for t in good]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        parts = match_parts(layer)
        epilogue = parts if isinstance(parts, str) else match_quantized_epilogue(parts)
        if isinstance(parts, str) or isinstance(epilogue, str):
            raise PlanRefused(str(epilogue))
        s = get_quantized_conv_shape(parts)
        if reason := why_not_few_channel_integer(s):
            raise PlanRefused(reason)
        x, w, _ = parts.operand_indices()
        tile, weights = FewChannelIntegerTile(s, *(int(v) for _, v in config)), parts.view.needs(w)
        constants = tile.constants(parts, epilogue)
        tiles_y, tiles_x = -(-s.p // tile.lines), -(-s.q // tile.wide)
        tiles, stride = s.n * tiles_y * tiles_x, s.stride[0]
        numbers, out, post_ops = make_stem_factors(parts, epilogue, s, signature.outputs[0].dtype.name)
        outside = (parts.reads[x].zero & 0xFF) * 0x01010101
        rows = make_packed_array(
            f"{weights.constant().digest}|narrow 8 bits {stride}", tile.steps * THREADS * 16,
            lambda: pack_filters_for_registers(get_weight_bytes(weights), s)
        )

        def make(args: Args) -> list:
            pair = s.c * stride
            image = (pair, s.w // stride, s.h, s.n)
            pixels = tensormap.make_tiled_map(args.inputs[x], "u8", image, (pair, s.w * s.c, s.h * s.w * s.c), (s.c, tile.columns, tile.rows, 1))
            residual = 0 if epilogue.residual is None else args.inputs[epilogue.residual]
            sizes = (s.h, s.w // stride, s.p, s.q, tiles_y, tiles_x, tiles)
            ends = (post_ops.activation[1:], out.per_step, out.zero, out.add_step, outside & 0xFFFFFFFF)
            arguments = QConvFewChannelArguments(pixels, WeightFields.of(args, s.k), residual, args.outputs[0], *sizes, *ends)
            return make_launches("qconv_few_channel", arguments, constants, tile, tiles, backend.capabilities.multiprocessors, layer.name)

        name = f"narrow wgmma {parts.reads[x].dtype} {tile.tall}x{tile.wide} b{tile.blocks}"
        return GpuKernel(layer, signature, make, implementation=name, packed=(rows, numbers), rtol=0.0)


@dataclass(frozen=True)
class FewChannelIntegerTile:
    """Sizes of an instance of qconv_few_channel.cu: columns of results, passes of 64 / channels rows, blocks on a multiprocessor."""

    shape: ConvShape
    wide: int
    tall: int
    blocks: int

    @property
    def side(self) -> int:
        """Result rows in operand A."""
        return 64 // self.shape.k

    @property
    def lines(self) -> int:
        """Rows of results."""
        return self.tall * self.side

    @property
    def rows(self) -> int:
        """Image rows that the results read."""
        return (self.lines - 1) * self.shape.stride[0] + self.shape.r

    @property
    def columns(self) -> int:
        """Columns of the image (with stride 2: even columns, then as many odd ones)."""
        s, step = self.shape, self.shape.stride[1]
        return self.wide + (s.s - 1 - s.pad[1]) // step + -(-s.pad[1] // step)

    @property
    def steps(self) -> int:
        """Products of 64 x 32 x `wide` in a pass."""
        s = self.shape
        return ((self.side - 1) * s.stride[0] + s.r) * s.s * s.c // 32

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        part = -(-self.rows * self.columns * self.shape.c // 1024) * 1024
        return 1024 + self.shape.stride[0] * part + 2 * self.side * self.wide * self.shape.k + 8

    def fits(self, added: bool) -> bool:
        """True if a multiprocessor can hold it: registers for accumulators, weights, a residual, addresses."""
        registers = self.wide // 2 + self.steps * 4 + 44 + (-(-self.wide * 4 // THREADS) * 4 if added else 0)
        return max(self.columns, self.rows) <= 256 and fits_multiprocessor(registers, self.shared, self.blocks)

    def constants(self, parts: Parts, epilogue: Epilogue) -> dict[str, int]:
        """The macros of the instance."""
        s, stores = self.shape, parts.stores
        assert stores is not None
        other = 0 if epilogue.residual is None else TYPES[parts.reads[epilogue.residual].dtype.name]
        return {
            "C": s.c, "KC": s.k, "R": s.r, "S": s.s, "STRIDE": s.stride[0], "PAD_H": s.pad[0], "PAD_W": s.pad[1], "BN": self.wide,
            "TALL": self.tall, "RESIDUAL": other, "LATE": int(epilogue.post_ops.residual == 2),
            "IN8": TYPES[parts.reads[parts.source_index()].dtype.name],
            "TO": TYPES[stores.dtype.name], "ACT": ACTIVATIONS[epilogue.post_ops.activation[0]], "FOLD": 1, "BLOCKS": self.blocks, "WEIGHTS_AS_A": 1,
        }  # fmt: skip


def why_not_few_channel_integer(s: ConvShape) -> str | None:
    """Why the kernel cannot compute a convolution, or None."""
    if s.c not in (32, 64) or s.k not in (32, 64):
        return f"{s.c} input and {s.k} output channels; takes 32 or 64"
    if s.stride not in ((1, 1), (2, 2)) or s.dilation != (1, 1) or s.w % s.stride[1] or not 1 < s.r * s.s <= _MOST_TAPS:
        return f"filter {s.r} x {s.s}, strides {s.stride}, {s.w} columns; takes 2 to {_MOST_TAPS} taps, strides of 1 or 2 dividing them, no dilation"
    if any(t.fits(True) for t in list_integer_tiles(s)):
        return None
    return "weights and accumulators exceed the registers, or an image tile exceeds shared memory"


def list_integer_tiles(s: ConvShape) -> list[FewChannelIntegerTile]:
    """All tiles to consider."""
    return [
        FewChannelIntegerTile(s, w, tall, blocks)
        for w in list_tile_widths(s.q)
        for tall in (1, 2, 4)
        for blocks in (1, 2, 3, 4)
        if tall * (64 // s.k) < 2 * s.p
    ]


def pack_filters_for_registers(weights: np.ndarray, s: ConvShape) -> np.ndarray:
    """Filters [k, c, r, s] of i8 as registers of operand A: K runs over image rows, taps, channels."""
    side, step = 64 // s.k, s.stride[0]
    depth = (side - 1) * step + s.r
    tall = np.zeros((side, s.k, depth, s.s, s.c), np.int8)
    for i in range(side):
        tall[i, :, i * step : i * step + s.r] = weights.transpose(0, 2, 3, 1)
    return pack_for_registers(tall.reshape(64, -1, 32))

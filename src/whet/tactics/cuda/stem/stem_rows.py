"""Stem convolutions of stride 2 with the following max pooling, row by row: windows that overlap in shared memory are rows of an operand.

Separate from `stem_pool` because nothing is gathered and weights stay in registers: 74 to 77 us instead of 205 to 214 for 128 images.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.network.types import F32, DType
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_weight_and_bias
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstPointer, ConstUint4Pointer, Int32, Pointer
from whet.tactics.cuda._device.kernel import RTOL, TYPE, Epilogue, GpuKernel, compile_ahead, launch, machine_has, make_packed_array, match_epilogue
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import ConvShape
from whet.tactics.cuda.conv.conv import get_conv_shape
from whet.tactics.cuda.stem.stem_pool import StemPool, get_image_index, make_body_convolution, pool_window

_ROWS = (1, 2, 4, 7, 8, 14, 28)  # pooled rows of a block
_RING = 16  # image rows that a block keeps
MAX_CONFIGS = 20


@dataclass(frozen=True)
class StemRowsArguments(Arguments, kernel="stem_rows.cu"):
    weights: ConstUint4Pointer  # [STEPS][4 warps][32 lanes] fragments
    input: ConstPointer  # [n][C][h][w]
    out: Pointer  # [n][p][q][k]
    h: Int32  # p, q: size of the pooled image
    w: Int32
    k: Int32
    p: Int32
    q: Int32
    rows: Int32  # pooled rows of a block, blocks per image column; pooled columns of a block, blocks per image row
    strips: Int32
    wide: Int32
    tiles: Int32
    act: ActivationParameters


@dataclass(frozen=True)
class Columns:
    """Distribution of result columns to blocks: `wide` pooled columns and `bn` results each; the first 8 (`skip`) are the previous block's."""

    wide: int
    tiles: int
    skip: int
    bn: int

    @staticmethod
    def of(pooled: int, wide: int) -> Columns:
        """The distribution for an image of `pooled` columns."""
        tiles = -(-pooled // wide)
        skip = int(tiles > 1)
        return Columns(wide, tiles, skip, -(-wide // 4) * 8 + 8 * skip)


@tactic
class StemRows(StemPool):
    """At most 3 input channels, 64 output channels, 14 x 7 taps, strides of 2; 3x3 pooling of stride 2 and padding 1; at most a Clip after it."""

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        return [s for s in super().signatures(layer, backend) if all(o is None or o.format == "linear" for o in s.inputs)]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        conv = make_body_convolution(layer)
        epilogue, s = match_epilogue(conv, find_epilogue_steps(conv)), get_conv_shape(conv)
        if isinstance(epilogue, str):
            return epilogue
        if epilogue.post_ops.activation[0] != "clip":
            return f"pools before it activates, which {epilogue.post_ops.activation[0]} does not allow"
        if s.c > 3 or s.k > 64 or s.k % 8 or s.r > _RING - 2 or s.s + s.pad[1] % 2 > 8 or s.pad[1] > 8 or s.stride != (2, 2) or s.dilation != (1, 1):
            return f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}; takes 3, 64, {_RING - 2} x 7, strides of 2, no dilation"
        if s.w % 4 or s.p % 2 or s.q % 2:
            return f"rows of {s.w} pixels, {s.p} x {s.q} results; takes pixels in fours and results in pairs"
        return None if _pools_pairs(layer) else "takes pooling windows of 3 x 3, strides of 2 and padding 1"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        s = get_conv_shape(make_body_convolution(layer))
        *_, p, q = static_shape(layer.outputs[0].shape)
        configs: dict[Config, float] = {}
        for wide in dict.fromkeys(-(-q // (4 * parts)) * 4 for parts in range(1, 9)):
            columns = Columns.of(q, wide)
            if columns.bn > 128:
                continue
            for rows, blocks in ((r, b) for r in _ROWS if r <= p for b in (1, 2, 3, 4)):
                if _estimate_registers(s, columns) <= 65536 // (128 * blocks) and _count_shared_bytes(s, columns) * blocks < 220 * 1024:
                    config: Config = (("rows", rows), ("wide", wide), ("blocks", blocks))
                    configs[config] = _estimate(s, columns, p, rows, blocks, backend.capabilities.multiprocessors)
        best = sorted(configs, key=lambda c: (configs[c], c))[:MAX_CONFIGS]
        compile_ahead(backend, list(dict.fromkeys(text("stem_rows.cu", _make_constants(s, signature, c, q)) for c in best)))
        return best

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        if reason := self.refuses(layer, signature, backend):
            raise PlanRefused(reason)
        conv = make_body_convolution(layer)
        epilogue, s, place = match_epilogue(conv, find_epilogue_steps(conv)), get_conv_shape(conv), get_image_index(layer, conv)
        assert not isinstance(epilogue, str)
        weights, own = get_weight_and_bias(conv)
        source, dtype = signature.inputs[place], signature.outputs[0].dtype
        assert source is not None
        assert weights is not None
        *_, p, q = static_shape(layer.outputs[0].shape)
        rows, wide, blocks = (int(v) for _, v in config)
        columns, constants, strips = Columns.of(q, wide), _make_constants(s, signature, config, q), -(-p // rows)
        shared = _count_shared_bytes(s, columns)

        def make(args: Args) -> list:
            sizes = (s.h, s.w, s.k, p, q, rows, strips, wide, columns.tiles)
            arguments = StemRowsArguments(args.packed[0], args.inputs[place], args.outputs[0], *sizes, act=epilogue.post_ops.activation[1:])
            return [launch("stem_rows", arguments, constants, (s.n * strips * columns.tiles, 1, 1), 128, shared=shared, label=layer.name)]

        rtol = RTOL[dtype.name] * (1.5 if source.dtype == F32 else 1)  # the image is rounded as well
        name = f"first wgmma pooled by rows {rows}x{wide} b{blocks}"
        return GpuKernel(layer, signature, make, implementation=name, packed=(_pack_fragments(s, weights, epilogue, own, dtype),), rtol=rtol)


def _pools_pairs(layer: Layer) -> bool:
    """True if the pooling has 3 x 3 windows, strides of 2 and padding of 1."""
    a = layer.regions["body"].layers[-1].attrs
    square = all(len(set(a.get(name) or (1,))) == 1 for name in ("kernel_shape", "strides", "pads", "dilations"))
    return square and not a.get("ceil_mode") and set(a.get("dilations") or (1,)) == {1} and pool_window(layer) == (3, 2, 1)


def count_leading_columns(s: ConvShape) -> int:
    """Columns from the start of a filter row to a result's first tap: the padding, plus one zero tap if it is odd."""
    return s.pad[1] + s.pad[1] % 2


def count_halves(s: ConvShape) -> int:
    """Groups of four taps in a filter row."""
    return max(-(-(s.s + s.pad[1] % 2) // 4), -(-count_leading_columns(s) // 4))


def _pack_fragments(s: ConvShape, weights: Tensor, epilogue: Epilogue, own: Tensor | None, dtype: DType) -> Packed:
    """Filters in the order of the tensor cores' registers: [step, warp, lane, 4 registers of two values].

    The fourth channel of three taps is the bias. A lane's two rows of the operand are two neighbouring channels of the result.
    """
    steps = s.r * count_halves(s)

    def make_fragments() -> np.ndarray:
        side = np.zeros((64, s.r, count_halves(s) * 4, 4), np.float32)
        at = s.pad[1] % 2
        side[: s.k, :, at : at + s.s, : s.c] = np.asarray(weights.array(), np.float32).transpose(0, 2, 3, 1)
        left, most = epilogue.bias(own, s.k), float(ml_dtypes.finfo(dtype.numpy).max)
        for tap in range(3):  # in parts: their sum has the bits of a float
            part = np.where(np.isfinite(left), np.clip(left, -most, most), left).astype(dtype.numpy).astype(np.float32)
            side[: s.k, 0, tap, 3] = part
            left = np.where(np.isfinite(left), left - part, 0)
        # channel = warp, row of eight, parity; element of K = half, quarter, parity
        ordered = side.reshape(4, 8, 2, steps, 2, 4, 2).transpose(3, 0, 1, 5, 4, 2, 6)
        return np.ascontiguousarray(ordered).astype(dtype.numpy)

    digest = own.constant().digest if own is not None else ""
    key = f"{weights.constant().digest}|first rows {s.r} {s.s} {s.pad[1]} {dtype} bias {digest} {epilogue.key}"
    return make_packed_array(key, steps * 4 * 32 * 16, make_fragments)


def count_quads(s: ConvShape, columns: Columns) -> int:
    """Groups of four pixels in a block's image row; mirrors stem_rows.cu."""
    left = -(-count_leading_columns(s) // 4) * 4
    return (2 * columns.bn - 2 + left - count_leading_columns(s) + 4 * count_halves(s) + 3) // 4


def _count_shared_bytes(s: ConvShape, columns: Columns) -> int:
    return 128 + _RING * count_quads(s, columns) * 32


def _estimate_registers(s: ConvShape, columns: Columns) -> int:
    """Registers of a thread: accumulators, weights, the maxima of the row above, the rest. NVRTC reports 165 for 112 columns and 7 x 7."""
    return columns.bn // 2 + 4 * s.r * count_halves(s) + columns.bn // 8 + 42


def _estimate(s: ConvShape, columns: Columns, pooled: int, rows: int, blocks: int, multiprocessors: int) -> float:
    """A rough time in cycles, which only orders candidates."""
    total = s.n * -(-pooled // rows) * columns.tiles
    row = s.r * count_halves(s) * columns.bn // 2  # of the tensor cores
    together = min(blocks, -(-total // multiprocessors))
    turns = -(-total // (multiprocessors * together))
    return turns * (1500 + (2 * rows + 1) * max(together * row, row + 500))


def _make_constants(s: ConvShape, signature: Signature, config: Config, pooled: int) -> dict[str, int]:
    """The macros of an instance."""
    _, wide, blocks = (int(v) for _, v in config)
    columns = Columns.of(pooled, wide)
    source = next(o for o in signature.inputs if o is not None)
    return {
        "C": s.c,
        "R": s.r,
        "HALVES": count_halves(s),
        "LEAD": count_leading_columns(s),
        "PAD_H": s.pad[0],
        "BN": columns.bn,
        "SKIP": columns.skip,
        "FROM": TYPE[source.dtype.name],
        "BLOCKS": blocks,
        "BF16": int(signature.outputs[0].dtype.name == "bf16"),
    }

"""Quantized stem convolutions of stride 2 from a float image, pooled or not: windows overlap in shared memory, weights stay in registers.

Separate from qstem_pool because nothing is gathered: quantizing, convolution and pooling take 99 us for 128 images
(24 + 93 + 43 us in three launches), and 37 us instead of 50 in YOLOv5s at batch 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.network.types import F32
from whet.tactics._base import Args, Config, Operand, PlanRefused, Signature, Tactic, tactic
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, Float32, Int32, Pointer
from whet.tactics.cuda._device.kernel import ACTIVATIONS, GpuKernel, all_static, compile_ahead, machine_has, make_packed_array, make_stored_signature
from whet.tactics.cuda._device.source import emit_kernel_source as text
from whet.tactics.cuda.conv._conv import TYPES, ConvShape
from whet.tactics.cuda.conv._weights_as_a import THREADS, WeightFields, fits_multiprocessor, list_tile_widths, make_launches, pack_for_registers
from whet.tactics.cuda.quantized._quantized import folds
from whet.tactics.cuda.quantized._quantized_image import Image, match_image
from whet.tactics.cuda.stem.qstem import make_stem_factors
from whet.tactics.cuda.stem.stem_pool import pool_window

_COMPOSITES = ("ConvPool", "QuantizeThenConv")


@dataclass(frozen=True)
class QStemOverlapArguments(Arguments, kernel="qstem_overlap.cu"):
    weights: WeightFields
    image: ConstFloatPointer
    out: Pointer
    h: Int32  # image and convolution
    w: Int32
    p: Int32
    q: Int32
    store_p: Int32  # stored result (pooled or not)
    store_q: Int32
    top: Int32  # rows and columns of padding before the image, even
    left: Int32
    tiles_y: Int32
    tiles_x: Int32
    tiles: Int32
    act: ActivationParameters
    per_step: Float32
    zero: Float32
    image_per_step: Float32
    in_zero: Int32


@tactic
class QStemOverlap(Tactic):
    """Layers of fuse_quantized_pool and fuse_quantize_then_conv with a float image: up to 4 channels in, 32 or 64 out, filters up to 8 x 8."""

    ops = ("*",)
    composites = _COMPOSITES

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        image = _match_parts(layer)
        return image if isinstance(image, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        image = _match_parts(layer)
        if isinstance(image, str) or not all_static(layer) or image.parts.stores is None:
            return []
        return [make_stored_signature(layer, {image.image: Operand("linear", F32)}, Operand("nhwc", image.parts.stores.dtype))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        image = _match_parts(layer)
        if isinstance(image, str):
            return image
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        return _why_not_sizes(layer, image)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        image = _match_parts(layer)
        assert isinstance(image, Image)
        good = [c for c in _list_tiles(layer, image.shape) if c.fits()]
        compile_ahead(backend, [text("qstem_overlap.cu", _make_constants(layer, image, signature, c)) for c in good])
        return [(("wide", c.wide), ("tall", c.tall), ("blocks", c.blocks)) for c in good]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        image = _match_parts(layer)
        if isinstance(image, str):
            raise PlanRefused(image)
        if reason := _why_not_sizes(layer, image):
            raise PlanRefused(reason)
        s, parts = image.shape, image.parts
        tile = _Tile(s, _has_pool(layer), *(int(v) for _, v in config))
        constants = _make_constants(layer, image, signature, tile)
        *_, p, q = static_shape(layer.outputs[0].shape)
        tiles_y, tiles_x = -(-p // tile.stored_rows), -(-s.q // tile.wide)
        tiles = s.n * tiles_y * tiles_x
        numbers, out, post_ops = make_stem_factors(parts, image.epilogue, s, signature.outputs[0].dtype.name)
        weights = parts.view.inputs[parts.operand_indices()[1]]
        assert weights is not None
        step, zero = image.step, parts.reads[parts.source_index()].zero
        assert step is not None
        key, size = f"{weights.constant().digest}|stem 8 bits {s.pad}", tile.steps * THREADS * 16
        packed = (make_packed_array(key, size, lambda: pack_fragments(weights.array(), s)), numbers)

        def make(args: Args) -> list:
            sizes = (s.h, s.w, s.p, s.q, p, q, s.pad[0] + s.pad[0] % 2, s.pad[1] + s.pad[1] % 2, tiles_y, tiles_x, tiles)
            ends = (post_ops.activation[1:], out.per_step, out.zero, 1.0 / step, zero)
            arguments = QStemOverlapArguments(WeightFields.of(args, s.k), args.inputs[image.image], args.outputs[0], *sizes, *ends)
            return make_launches("qstem_overlap", arguments, constants, tile, tiles, backend.capabilities.multiprocessors, layer.name)

        name = f"stem of integers{' pooled' if tile.pooled else ''} {tile.tall}x{tile.wide} b{tile.blocks}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, rtol=0.0)


@dataclass(frozen=True)
class _Tile:
    """Sizes of an instance of qstem_overlap.cu; its macros have the same names in capitals."""

    shape: ConvShape
    pooled: bool
    wide: int
    tall: int
    blocks: int

    @property
    def side(self) -> int:
        return 64 // self.shape.k

    @property
    def stored_rows(self) -> int:
        """Rows that a tile stores."""
        return self.tall if self.pooled else self.tall * self.side

    @property
    def steps(self) -> int:
        return len(step_positions(self.shape))

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        ty, tx = _count_window_cells(self.shape)
        lines = 2 * self.tall + 1 if self.pooled else self.stored_rows
        stage = self.side * (self.wide // 2 if self.pooled else self.wide) * self.shape.k
        return 1024 + -(-(lines + ty - 1) * (self.wide + tx - 1) * 16 // 128) * 128 + 2 * stage

    def fits(self) -> bool:
        """True if `blocks` blocks fit a multiprocessor: registers for accumulators, weights, maxima and addresses, and shared memory."""
        registers = self.wide // 2 + self.steps * 4 + (self.wide // 4 if self.pooled else 0) + 40
        return fits_multiprocessor(registers, self.shared, self.blocks)


def _match_parts(layer: Layer) -> Image | str:
    """The layer's convolution and image, or the reason why the kernel cannot compute it."""
    if layer.composite not in _COMPOSITES:
        return f"computes a quantized first convolution, not {layer.composite or layer.op}"
    image = match_image(layer, layer.composite)
    if isinstance(image, str):
        return image
    return image if image.step is not None else "takes an f32 image that is quantized to the convolution's input"


def _has_pool(layer: Layer) -> bool:
    return layer.composite == "ConvPool"


def _why_not_sizes(layer: Layer, image: Image) -> str | None:
    """The reason why the kernel cannot compute these sizes, or None."""
    s, scales = image.shape, image.parts.reads
    if s.stride != (2, 2) or s.dilation != (1, 1) or max(_count_window_cells(s)) > 4 or s.c > 4 or s.k not in (32, 64) or s.w % 2:
        return (
            f"{s.c} input and {s.k} output channels, filter {s.r} x {s.s}, strides {s.stride}, {s.w} columns; takes at most 4, 32 or 64,"
            "8 x 8 counted from an even column, strides of 2, no dilation, an even number"
        )
    if not _has_pool(layer):
        return None
    a = layer.regions["body"].layers[-1].attrs
    if a.get("ceil_mode") or set(a.get("dilations") or (1,)) != {1} or len(set(a.get("pads") or (0,))) != 1 or pool_window(layer) != (3, 2, 1):
        return "takes a pooling of 3 x 3 windows, strides of 2 and padding of 1 on all sides"
    if s.k != 64 or s.q > 128:
        return f"{s.k} channels and {s.q} columns before a pooling; takes 64 and at most 128"
    if image.epilogue.post_ops.activation[0] != "clip" or any(np.any(scales[i].scale < 0) for i in image.parts.operand_indices()[:2]):
        return "pools before it activates, which takes a Clip and no negative scale"
    return None


def _count_window_cells(s: ConvShape) -> tuple[int, int]:
    """Rows and columns of 16-byte cells (2 x 2 pixels of the image) that a window reads."""
    return (s.pad[0] % 2 + s.r + 1) // 2, (s.pad[1] % 2 + s.s + 1) // 2


def step_positions(s: ConvShape) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    """The two places (row, column) of each step of 32 bytes of K, as step_place and step_apart of qstem_overlap.cu have them."""
    ty, tx = _count_window_cells(s)
    depth = ty + 64 // s.k - 1
    places: list[tuple[tuple[int, int], tuple[int, int] | None]] = [((y, x), (y, x + 1)) for y in range(depth) for x in range(0, tx - 1, 2)]
    if tx % 2:
        places += [((y, tx - 1), (y + 1, tx - 1) if y + 1 < depth else None) for y in range(0, depth, 2)]
    return places


def pack_fragments(weights: np.ndarray, s: ConvShape) -> np.ndarray:
    """Filters [k, c, r, s] of i8 as registers of operand A: [step, thread, 16 bytes]."""
    k, c, (ty, tx) = s.k, s.c, _count_window_cells(s)
    by_place = np.zeros((k, ty * 2, tx * 2, c), np.int8)
    top, left = s.pad[0] % 2, s.pad[1] % 2
    by_place[:, top : top + s.r, left : left + s.s] = np.asarray(weights, np.int8).transpose(0, 2, 3, 1)
    place = np.zeros((k, ty, tx, 16), np.int8)  # two rows, two columns, channels
    place[..., : 4 * c] = by_place.reshape(k, ty, 2, tx, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(k, ty, tx, 4 * c)
    steps = step_positions(s)
    tall = np.zeros((64, len(steps), 2, 16), np.int8)
    for side in range(64 // k):
        for i, pair in enumerate(steps):
            for half, at in enumerate(pair):
                if at is not None and 0 <= at[0] - side < ty:
                    tall[side * k : (side + 1) * k, i, half] = place[:, at[0] - side, at[1]]
    return pack_for_registers(tall.reshape(64, len(steps), 32))


def _list_tiles(layer: Layer, s: ConvShape) -> list[_Tile]:
    """Candidates to time."""
    if _has_pool(layer):
        wide = -(-s.q // 16) * 16
        return [_Tile(s, True, wide, tall, blocks) for tall in (1, 2, 4, 7) for blocks in (2, 3, 4)]
    return [_Tile(s, False, w, tall, blocks) for w in list_tile_widths(s.q) for tall in (2, 4) for blocks in (2, 3, 4)]


def _make_constants(layer: Layer, image: Image, signature: Signature, tile: _Tile) -> dict[str, int]:
    """The macros of an instance."""
    s, parts, stores = image.shape, image.parts, signature.outputs[0].dtype.name
    ty, tx = _count_window_cells(s)
    kind = TYPES[parts.reads[parts.source_index()].dtype.name]
    return {
        "C": s.c, "TY": ty, "TX": tx, "BN": tile.wide, "KC": s.k, "TALL": tile.tall,
        "POOL": int(tile.pooled), "Q": s.q if tile.pooled else 0, "IN8": kind, "TO": TYPES[stores],
        "ACT": ACTIVATIONS[image.epilogue.post_ops.activation[0]], "FOLD": int(folds(image.epilogue, stores)),
        "BLOCKS": tile.blocks, "WEIGHTS_AS_A": 1,
    }  # fmt: skip

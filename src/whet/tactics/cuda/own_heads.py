"""A detector's heads from their last convolutions to the boxes, a launch a level: what lies between is never stored."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.launch import Launch
from whet.network import Layer, static_shape
from whet.network.types import F32, DType
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Tactic, tactic
from whet.tactics._fused import anchor, constants_of, epilogue, is_quantized
from whet.tactics.cuda._body import seen
from whet.tactics.cuda._conv import NONE
from whet.tactics.cuda._conv_config import REGISTERS, SHARED_LIMIT
from whet.tactics.cuda._kernel import HALF, RTOL, GpuKernel, ahead, all_static, ending, float_types, loaded, machine_has, packed_array, same
from whet.tactics.cuda._moves import Moves, described
from whet.tactics.cuda._source import source
from whet.tactics.cuda.own_conv import constant_weights, conv_shape

_MOST = 128  # numbers of a row


@dataclass(frozen=True)
class Level:
    """One source of the rows: its convolution as a layer of its own, where the whole's input is, sizes, its first row in an image, its code."""

    conv: Layer
    place: int
    channels: int
    pixels: int
    anchors: int
    first: int
    text: str


@dataclass(frozen=True)
class Heads:
    """All levels, images, rows of an image, numbers of a row, and the constants that the code reads."""

    levels: tuple[Level, ...]
    images: int
    rows: int
    span: int
    numbers: np.ndarray

    @property
    def columns(self) -> int:
        """Columns of an anchor's product."""
        return -(-self.span // 16) * 16

    def shared(self, level: Level, wgs: int) -> int:
        """Bytes of shared memory; mirrors heads.cu."""
        hold = -(-level.channels // 64)
        return 1024 + hold * (self.columns + wgs * 64) * 128 + wgs * 64 * self.span * 4 + self.columns * 4 + 16

    def blocks(self, level: Level, wgs: int) -> int:
        """Blocks that a multiprocessor holds; 0: none."""
        registers = self.columns // 2 + 56  # sums, addresses, what an element is computed with
        return max(0, min((SHARED_LIMIT + 1024) // (self.shared(level, wgs) + 1024), REGISTERS // (wgs * 128 * registers), 4))

    def constants(self, level: Level, wgs: int, bf16: bool) -> dict[str, Any]:
        """The macros of a level's instance."""
        own = {"SPAN": self.span, "BN": self.columns, "HOLD": -(-level.channels // 64), "WGS": wgs, "BLOCKS": self.blocks(level, wgs)}
        return {**own, "BF16": int(bf16), "STEPS": level.text}


@tactic
class OwnHeads(Tactic):
    """What the pass fuse_heads makes, where each number of a row is computed of one channel and channels are (anchor, number); results in f32."""

    ops = ("*",)
    hints = ("Heads",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.hint not in self.hints:
            return f"computes a detector's heads, not {layer.hint or layer.op}"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if not all_static(layer) or len(layer.outputs) != 1 or layer.outputs[0].dtype != F32 or isinstance(_heads(layer), str):
            return []
        places = [i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant]
        types = float_types([layer.inputs[i] for i in places], HALF)
        return [same(layer, dict.fromkeys(places, Operand("nhwc", t)), Operand("linear", F32)) for t in types]

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        if not machine_has(machine, "wgmma"):
            return "needs Hopper's tensor cores (sm_90a)"
        made = _heads(layer)
        return made if isinstance(made, str) else None

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> Sequence[Config]:
        made = _heads(layer)
        if isinstance(made, str):
            return []
        bf16 = _stored(signature).name == "bf16"
        found = [wgs for wgs in (1, 2, 4) if all(made.blocks(x, wgs) for x in made.levels)]
        ahead(machine, [source("heads.cu", made.constants(x, wgs, bf16)) for wgs in found for x in made.levels])
        return [(("wgs", wgs),) for wgs in found]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GpuKernel:
        made, wgs, dtype = _heads(layer), int(dict(config)["wgs"]), _stored(signature)
        if isinstance(made, str) or not all(made.blocks(x, wgs) for x in made.levels):
            raise PlanRefused(made if isinstance(made, str) else f"a multiprocessor cannot hold a block of {wgs * 64} pixels")
        key = "+".join(t.weight.digest for t in layer.inputs if t is not None and t.weight is not None)
        packed = [packed_array(f"{key}|heads", made.numbers.nbytes, lambda: made.numbers)]
        for x in made.levels:
            packed += _packed(made, x, dtype)

        def make(args: Args) -> list[Launch]:
            return [
                _launch(made, x, wgs, dtype, args, (args.packed[1 + 2 * i], args.packed[2 + 2 * i]), machine.multiprocessors, layer.name)
                for i, x in enumerate(made.levels)
            ]

        return GpuKernel(layer, signature, make, implementation=f"own heads {wgs * 64} pixels", packed=packed, rtol=RTOL[dtype.name])


def _stored(signature: Signature) -> DType:
    return next(o.dtype for o in signature.inputs if o is not None)


def _packed(made: Heads, x: Level, dtype: DType) -> list[Packed]:
    """Filters and bias of a level, an anchor's numbers filled up to whole tiles with zeros."""
    weights, own = constants_of(x.conv)
    finish, wide = ending(x.conv, epilogue(x.conv)), -(-x.channels // 64) * 64
    assert not isinstance(finish, str)
    count = x.anchors * made.span

    def filters() -> np.ndarray:
        given = np.asarray(weights.array(), np.float32)[:count].reshape(x.anchors, made.span, x.channels)
        out = np.zeros((x.anchors, made.columns, wide), dtype.numpy)
        out[:, : made.span, : x.channels] = given
        return out

    def bias() -> np.ndarray:
        out = np.zeros((x.anchors, made.columns), np.float32)
        out[:, : made.span] = finish.bias(own, int(weights.shape[0]))[:count].reshape(x.anchors, made.span)
        return out

    key = f"{weights.weight.digest} {made.span} {made.columns}"
    digest = own.weight.digest if own is not None else ""
    return [
        packed_array(f"{key}|heads {wide} {dtype}", x.anchors * made.columns * wide * 2, filters),
        packed_array(f"{key} {digest} {finish.key}|heads bias", x.anchors * made.columns * 4, bias),
    ]


def _launch(made: Heads, x: Level, wgs: int, dtype: DType, args: Args, packed: tuple[int, int], multiprocessors: int, label: str) -> Launch:
    constants = made.constants(x, wgs, dtype.name == "bf16")
    kernel = loaded("heads.cu", "heads", tuple(sorted(constants.items())), made.shared(x, wgs))
    line, wide, bm = x.channels * 2, constants["HOLD"] * 64, wgs * 64
    blob = tensormap.tiled(args.inputs[x.place], dtype.name, (x.channels, x.pixels, made.images), (line, line * x.pixels), (64, bm, 1))
    blob += tensormap.tiled(packed[0], dtype.name, (wide, x.anchors * made.columns), (wide * 2,), (64, made.columns))
    each = -(-x.pixels // bm)
    tiles = made.images * each
    blob += struct.pack("<3Q6i", packed[1], args.packed[0], args.outputs[0], x.pixels, each, tiles, x.anchors, x.first, made.rows)
    grid = max(1, min(tiles, multiprocessors * constants["BLOCKS"] // x.anchors)) * x.anchors
    return Launch(kernel, (grid, 1, 1), wgs * 128, blob + bytes(-len(blob) % 64), label=label)


def _heads(layer: Layer) -> Heads | str:
    """What the layer is, or why it is nothing that the kernel computes."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    *convs, last = (seen(x, outer) for x in body.layers)
    if last.hint != "Moves" or not convs:
        return "the body is no moves behind convolutions"
    by_result = {x.outputs[0]: x for x in convs}
    shape = static_shape(last.outputs[0].shape)
    if len(shape) != 3 or shape[2] > _MOST:
        return f"results of shape {list(shape)}: rows of at most {_MOST} numbers"
    formats = {i: "nhwc" for i, t in enumerate(last.inputs) if t is not None and not t.is_constant}
    moves = described(lambda: Moves(last, formats, "linear", rows=True))
    if isinstance(moves, str):
        return moves
    fed = {t: i for i, t in enumerate(layer.inputs)}
    images, rows, span = shape
    levels: list[Level] = []
    first = 0
    for k, i in enumerate(moves.sources):
        conv = by_result.get(last.inputs[i])
        if conv is None:
            return "a source is no convolution's result"
        if reason := _conv_reason(conv):
            return reason
        s = conv_shape(conv)
        anchors, x = s.k // span, conv.inputs[0]
        if x not in fed or s.n != images or s.p * s.q % 4 or s.c % 8:
            return f"{s.n} images of {s.p} x {s.q} pixels, {s.c} channels: pixels in fours, channels in eights"
        text = moves.level(k, first, anchors, s.p * s.q, s.k)
        if text is None:
            return "a row of the result is not an anchor of one pixel, in this order"
        levels.append(Level(conv, fed[x], s.c, s.p * s.q, anchors, first, text))
        first += anchors * s.p * s.q
    return Heads(tuple(levels), images, rows, span, moves.numbers) if first == rows else "levels and rows differ"


def _conv_reason(conv: Layer) -> str | None:
    """Why a convolution is none of those in front of a head, or None."""
    if is_quantized(conv):
        return "computes in floating point, the layer is quantized"
    head = anchor(conv)
    if head.op != "Conv" or head.inputs[0].type.rank != 4 or head.attrs["group"] != 1 or not conv_shape(conv).plain:
        return "a head ends with 1x1 convolutions of images"
    if reason := constant_weights(conv, head):
        return reason
    made = ending(conv, epilogue(conv))
    if isinstance(made, str):
        return made
    return None if made.residual is None and made.finish.activation == NONE else "its last convolutions have no activation and add nothing"

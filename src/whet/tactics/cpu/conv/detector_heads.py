"""A detector's heads at once, f32: 1x1 convolutions and the moves with arithmetic behind them, by a kernel of our own.

A thread convolves some pixels into memory that stays in its cache and writes the rows of the result that are made of them: what the convolutions
make, as large as the result, is neither written nor read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import BF16, F32, DType, Layer, Tensor, static_shape, symbols
from whet.ops import bind_layer
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, stored_bytes, tactic
from whet.tactics._moves_indices import Refused
from whet.tactics._moves_runs import Run, runs
from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu.conv._blocked_conv import Tile
from whet.tactics.cpu.conv._detector_heads_ir import Level, heads_ir, thread_bytes
from whet.tactics.cpu.conv._pointwise_ir import STEP, TILES
from whet.tactics.cpu.conv.pointwise_conv import packed
from whet.tactics.cpu.onednn._kernel import static

KIND = "HeadConvs"
_TILES = (24, 48)  # pixels of an item
_RUNS = 64  # of a level's image: more are no rows that lie together
_APART = 16  # floats between pixels' channels: with a multiple of 64 in all, few places of the cache would hold all pixels


@dataclass(frozen=True)
class Head:
    """One of the layer's convolutions: which source of the moves it makes, the place of its image among the layer's inputs, what it multiplies with,
    and what it makes in the body."""

    source: int
    image: int
    weights: Tensor
    bias: Tensor | None
    made: Tensor

    @property
    def work(self) -> int:
        return prod(static_shape(self.made.shape)) * static_shape(self.weights.shape)[1]


class HeadsKernel:
    """A planned launch; its packed operands are the moves' constants, the runs' table, and weights and biases of each level."""

    serial_work = 1 << 18  # multiplications

    # The sums' 1e-5, doubled by what squares them (boxes' sides), and the moves' own; in pieces each part has its bound, from rounded inputs
    rtol, deterministic = 3e-5, True

    def __init__(self, layer: Layer, signature: Signature, blocks: int, pixels: int, tile: int, count: int) -> None:
        heads, view = taken_apart(layer)
        self.images = [h.image for h in heads]
        self.inputs, self.outputs = stored_bytes(layer, signature)
        groups = [-(-static_shape(h.made.shape)[1] // (blocks * LANES)) for h in heads]
        pitches = {h.source: g * blocks * LANES + _APART for h, g in zip(heads, groups, strict=True)}
        made, found = _moves(view, signature.outputs[0].format, pitches)
        table: list[Run] = []
        levels = []
        for head, g in zip(heads, groups, strict=True):
            (images, _, *sides), taps = static_shape(head.made.shape), static_shape(head.weights.shape)[1]
            mine = [r for r in found if r.source == head.source]
            size = min(tile, prod(sides))
            items = images * -(-prod(sides) // size)
            levels.append(
                Level(head.source, prod(sides), -(-taps // LANES), taps, g, pitches[head.source], items, size, len(table), len(mine))
            )  # fmt: skip
            table += mine
        self.items = sum(x.items for x in levels)
        self.threads = min(count, self.items) if sum(h.work for h in heads) > self.serial_work else 1
        self.scratch = self.threads * thread_bytes(levels, pixels)
        lines = np.array([(r.row, r.pixel, r.count, r.each) for r in table], np.int64)
        self.packed = (_numbers(made.numbers), _numbers(lines), *(_weights(h, g, blocks) for h, g in zip(heads, groups, strict=True)))
        self.ir = heads_ir(made, levels, blocks, pixels, jit.has("avx512dq"))
        self.implementation = f"own:{blocks * LANES} channels x {pixels} pixels, {tile} at once"

    def enqueue(self, args: Args, stream: Stream) -> None:
        context = [args.outputs[0], *args.packed[:2], args.scratch]
        operands = {0: ("output", 0)}
        for image, weights in zip(self.images, args.packed[2:], strict=True):
            operands[len(context)] = ("input", image)
            context += [args.inputs[image], weights]
        context += [self.items, -(-self.items // self.threads)]
        stream.record(jit.ParallelCall(jit.address(self.ir, "heads"), context, operands, self.threads, self.implementation))


def _numbers(values: np.ndarray) -> Packed:
    """Numbers that the kernel reads as they are."""
    return Packed(f"numbers|{hashlib.sha256(values.tobytes()).hexdigest()}", values.nbytes, lambda: values.reshape(-1).view(np.uint8))


def _weights(head: Head, groups: int, blocks: int) -> Packed:
    """As cpu/pointwise_conv has them."""
    weights, bias, taps = head.weights, head.bias, static_shape(head.weights.shape)[1]
    key = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
    tile = Tile(blocks, 1, groups)
    made = f"{key}|pointwise {blocks} {tile.channels}"
    return Packed(made, groups * (taps + 1) * blocks * LANES * 4, lambda: packed(weights, bias, tile).view(np.uint8))


@tactic
class Heads(CompiledTactic):
    needs_avx512 = True
    ops = ("*",)
    composites = (KIND,) if jit.available() is None and jit.has("avx512f") else ()  # elsewhere such layers stay in pieces
    what = "1x1 convolutions and the moves behind them at once"

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite != KIND:
            return f"computes {self.what}, not {layer.composite or layer.op}"
        if reason := self.unavailable():
            return reason
        for conv in layer.regions["body"].layers[:-1]:
            if conv.op != "Conv" or any(t.dtype != F32 for t in (conv.needs(0), conv.outputs[0])):
                return "is for convolutions in 32-bit floating point, with nothing behind them but the moves"
            if (channels := conv.needs(1).shape[1]) % STEP:
                return f"{channels} channels: it takes multiples of {STEP}"
        return None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        """What `why_not` and `refuses` say of one image: as many as there may be change nothing."""
        if said := self.why_not(layer):
            return said
        if BF16 in permitted and jit.has("avx512_bf16"):
            return "its parts may be faster in the 16-bit floats that are permitted"
        dims = {d for t in (*layer.inputs, *layer.outputs) if t is not None for d in t.shape}
        names = set().union(*(symbols(d) for d in dims))
        if len(names) > 1 or any(symbols(d) for t in layer.inputs if t is not None for d in t.shape[1:]):
            return "images of unknown sizes"
        one = bind_layer(layer, dict.fromkeys(names, 1))
        for signature in self.signatures(one, None):
            if (reason := self.refuses(one, signature, None)) is None:
                return None
        return reason

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or len(layer.outputs) != 1:
            return []
        images = {h.image for h in taken_apart(layer)[0]}
        inputs = tuple(Operand("nChw16c", F32) if i in images else None for i in range(len(layer.inputs)))
        targets = ("linear", "nhwc") if layer.outputs[0].type.rank == 4 else ("linear",)
        return [Signature(inputs, (Operand(target, F32),)) for target in targets]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        configs = self.configs(layer, signature, backend)
        if not configs:
            return "an image has fewer pixels than the smallest tile"
        try:
            self._kernel(layer, signature, configs[0])
        except Refused as e:
            return str(e)
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        """The tiles of registers of least work, with few and many pixels at once."""
        heads, _ = taken_apart(layer)
        least = min(prod(static_shape(h.made.shape)[2:]) for h in heads)
        fit = sorted(((b, p) for b, p in TILES if p <= least), key=lambda t: _cost(heads, *t))[:2]
        return [(("blocks", b), ("pixels", p), ("tile", n)) for b, p in fit for n in _TILES]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> HeadsKernel:
        try:
            return self._kernel(layer, signature, config, backend.threads)
        except Refused as e:
            raise PlanRefused(str(e)) from None

    def _kernel(self, layer: Layer, signature: Signature, config: Config, count: int = 1) -> HeadsKernel:
        """The layer on up to `count` threads. Raises Refused."""
        sizes = {name: int(n) for name, n in config}
        least = min(prod(static_shape(h.made.shape)[2:]) for h in taken_apart(layer)[0])
        if (sizes["blocks"], sizes["pixels"]) not in TILES or not sizes["pixels"] <= least or sizes["tile"] < sizes["pixels"]:
            raise Refused(f"a tile of {sizes['pixels']} pixels does not fit images of {least}")
        return HeadsKernel(layer, signature, sizes["blocks"], sizes["pixels"], sizes["tile"], count)


def taken_apart(layer: Layer) -> tuple[list[Head], Layer]:
    """The convolutions, those of most channels first (what is left for the end is little then), and the moves with their constants."""
    body = layer.regions["body"]
    *convs, moves = body.layers
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    view = Layer("Fused", moves.name, [outer.get(t, t) if t is not None else None for t in moves.inputs], moves.attrs, moves.regions, moves.sources)
    view.outputs = layer.outputs
    heads = []
    for source, t in enumerate(t for t in view.inputs if t is not None and not t.is_constant):
        conv = next(c for c in convs if c.outputs[0] is t)
        weights, bias = (None if x is None else outer[x] for x in (conv.needs(1), conv.input(2)))
        assert weights is not None
        heads.append(Head(source, body.inputs.index(conv.needs(0)), weights, bias, t))
    return sorted(heads, key=lambda h: -static_shape(h.weights.shape)[1]), view


def _moves(view: Layer, out: str, pitches: dict[int, int]) -> tuple[Moves, list[Run]]:
    """The moves over images that lie channels last with these pitches, and which rows are made of which pixels. Raises Refused."""
    places = [i for i, t in enumerate(view.inputs) if t is not None and not t.is_constant]
    made = Moves(view, dict.fromkeys(places, "nhwc"), out, pitches={i: pitches[k] for k, i in enumerate(places)})
    found = runs(made, [pitches[k] for k in range(len(places))])
    images = sum(static_shape(view.needs(i).shape)[0] for i in places)
    if len(found) > _RUNS * images:
        raise Refused(f"the rows lie in {len(found)} runs, of at most {_RUNS} an image")
    return made, found


def _cost(heads: list[Head], blocks: int, pixels: int) -> float:
    """Multiplications and loads of all levels, for 16 numbers of each input channel and pixel."""
    total = 0.0
    for h in heads:
        _, channels, *sides = static_shape(h.made.shape)
        groups, tiles = -(-channels // (blocks * LANES)), -(-prod(sides) // pixels)
        total += static_shape(h.weights.shape)[1] * groups * tiles * (blocks * pixels + blocks + pixels)
    return total

"""All heads of a detector in one kernel, f32: 1x1 convolutions, then moves with arithmetic.

A thread convolves some pixels into memory that stays in its cache, and writes the rows of the result that depend on them. The convolutions' outputs,
as large as the result, are not written to memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, DType, Layer, Tensor, find_symbols, static_shape
from whet.ops import bind_layer
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, count_stored_bytes, tactic
from whet.tactics._moves_indices import Refused
from whet.tactics._moves_runs import Run, runs
from whet.tactics._moves_tree import Moves
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import find_faster_type
from whet.tactics.cpu._llvm.registers import get_registers, why_no_registers
from whet.tactics.cpu.conv._blocked_conv import Tile
from whet.tactics.cpu.conv._detector_heads_ir import Level, count_thread_bytes, emit_heads_ir
from whet.tactics.cpu.conv._pointwise_ir import STEP, list_tiles
from whet.tactics.cpu.conv.pointwise_conv import pack_weights
from whet.tactics.cpu.onednn._kernel import is_static

KIND = "HeadConvs"
_TILES = (24, 48)  # pixels of an item
_MAX_RUNS = 64  # of a level's image: with more the rows are not contiguous enough
_PITCH_PADDING = 16  # floats after a pixel's channels: pitches that are multiples of 64 map all pixels to few cache sets


@dataclass(frozen=True)
class Head:
    """One of the layer's convolutions: its source index in the moves, the index of its image among the layer's inputs, weights, bias, and its
    output in the body."""

    source: int
    image: int
    weights: Tensor
    bias: Tensor | None
    output: Tensor

    @property
    def work(self) -> int:
        return prod(static_shape(self.output.shape)) * static_shape(self.weights.shape)[1]


class HeadsKernel:
    """A planned launch; its packed operands are the moves' constants, the runs' table, and weights and biases of each level."""

    serial_work = 1 << 18  # multiplications

    # 1e-5 of the convolutions, doubled by squaring the boxes' sides, and 1e-5 of the moves
    rtol, deterministic = 3e-5, True

    def __init__(self, layer: Layer, signature: Signature, blocks: int, pixels: int, tile: int, count: int) -> None:
        (heads, view), lanes = split_layer(layer), get_registers().lanes
        self.images = [h.image for h in heads]
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        groups = [-(-static_shape(h.output.shape)[1] // (blocks * lanes)) for h in heads]
        pitches = {h.source: g * blocks * lanes + _PITCH_PADDING for h, g in zip(heads, groups, strict=True)}
        moves, run_list = _make_moves_and_runs(view, signature.outputs[0].format, pitches)
        table: list[Run] = []
        levels = []
        for head, g in zip(heads, groups, strict=True):
            (images, _, *sides), taps = static_shape(head.output.shape), static_shape(head.weights.shape)[1]
            mine = [r for r in run_list if r.source == head.source]
            size = min(tile, prod(sides))
            items = images * -(-prod(sides) // size)
            levels.append(
                Level(head.source, prod(sides), -(-taps // lanes), taps, g, pitches[head.source], items, size, len(table), len(mine))
            )  # fmt: skip
            table += mine
        self.items = sum(x.items for x in levels)
        self.threads = min(count, self.items) if sum(h.work for h in heads) > self.serial_work else 1
        self.scratch = self.threads * count_thread_bytes(levels, pixels)
        lines = np.array([(r.row, r.pixel, r.count, r.each) for r in table], np.int64)
        self.packed = (_pack_array(moves.numbers), _pack_array(lines), *(_pack_weights(h, g, blocks) for h, g in zip(heads, groups, strict=True)))
        self.ir = emit_heads_ir(moves, levels, blocks, pixels, lanes, jit.has("avx512dq"))
        self.implementation = f"{blocks * lanes} channels x {pixels} pixels, items of {tile}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        context = [args.outputs[0], *args.packed[:2], args.scratch]
        operands = {0: ("output", 0)}
        for image, weights in zip(self.images, args.packed[2:], strict=True):
            operands[len(context)] = ("input", image)
            context += [args.inputs[image], weights]
        context += [self.items, -(-self.items // self.threads)]
        stream.record(jit.ParallelCall(jit.load_function(self.ir, "heads"), context, operands, self.threads, self.implementation))


def _pack_array(values: np.ndarray) -> Packed:
    """An array that the kernel reads unchanged."""
    return Packed(f"numbers|{hashlib.sha256(values.tobytes()).hexdigest()}", values.nbytes, lambda: values.reshape(-1).view(np.uint8))


def _pack_weights(head: Head, groups: int, blocks: int) -> Packed:
    """Packed as for cpu/pointwise_conv."""
    weights, bias, taps = head.weights, head.bias, static_shape(head.weights.shape)[1]
    key = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
    tile = Tile(blocks, 1, groups, get_registers().lanes)
    packed_key = f"{key}|pointwise {blocks} {tile.lanes} {tile.channels}"
    return Packed(packed_key, groups * (taps + 1) * blocks * tile.lanes * 4, lambda: pack_weights(weights, bias, tile).view(np.uint8), storable=True)


@tactic
class Heads(CompiledTactic):
    needs_registers = True
    ops = ("*",)
    composites = (KIND,) if jit.why_unavailable() is None and why_no_registers() is None else ()  # elsewhere such layers stay unfused
    what = "1x1 convolutions and the moves after them in one kernel"

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite != KIND:
            return f"computes {self.what}, not {layer.composite or layer.op}"
        if reason := self.unavailable():
            return reason
        for conv in layer.regions["body"].layers[:-1]:
            if conv.op != "Conv" or any(t.dtype != F32 for t in (conv.needs(0), conv.outputs[0])):
                return "takes f32 convolutions without an epilogue before the moves"
            if (channels := conv.needs(1).shape[1]) % STEP:
                return f"{channels} channels: it takes multiples of {STEP}"
        return None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        """The refusals for a batch of one: the batch size does not matter."""
        if refusal := self.why_not(layer):
            return refusal
        if find_faster_type(permitted):
            return "the separate layers may be faster in the permitted 16-bit floats"
        dims = {d for t in (*layer.inputs, *layer.outputs) if t is not None for d in t.shape}
        names = set().union(*(find_symbols(d) for d in dims))
        if len(names) > 1 or any(find_symbols(d) for t in layer.inputs if t is not None for d in t.shape[1:]):
            return "images of unknown sizes"
        one = bind_layer(layer, dict.fromkeys(names, 1))
        for signature in self._signatures(one):
            if (reason := self._refuses(one, signature)) is None:
                return None
        return reason

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        return self._signatures(layer)

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self._refuses(layer, signature)

    def _signatures(self, layer: Layer) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or len(layer.outputs) != 1:
            return []
        images = {h.image for h in split_layer(layer)[0]}
        inputs = tuple(get_registers().stored if i in images else None for i in range(len(layer.inputs)))
        targets = ("linear", "nhwc") if layer.outputs[0].type.rank == 4 else ("linear",)
        return [Signature(inputs, (Operand(target, F32),)) for target in targets]

    def _refuses(self, layer: Layer, signature: Signature) -> str | None:
        configs = _list_configs(layer)
        if not configs:
            return "an image has fewer pixels than the smallest tile"
        try:
            self._kernel(layer, signature, configs[0])
        except Refused as e:
            return str(e)
        return None

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        return _list_configs(layer)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> HeadsKernel:
        try:
            return self._kernel(layer, signature, config, backend.threads)
        except Refused as e:
            raise PlanRefused(str(e)) from None

    def _kernel(self, layer: Layer, signature: Signature, config: Config, count: int = 1) -> HeadsKernel:
        """The layer on up to `count` threads. Raises Refused."""
        sizes = {name: int(n) for name, n in config}
        least = min(prod(static_shape(h.output.shape)[2:]) for h in split_layer(layer)[0])
        if (sizes["blocks"], sizes["pixels"]) not in list_tiles() or not sizes["pixels"] <= least or sizes["tile"] < sizes["pixels"]:
            raise Refused(f"a tile of {sizes['pixels']} pixels does not fit images of {least}")
        return HeadsKernel(layer, signature, sizes["blocks"], sizes["pixels"], sizes["tile"], count)


def _list_configs(layer: Layer) -> list[Config]:
    """The two register tiles of lowest cost, with few and many pixels per item."""
    heads, _ = split_layer(layer)
    least = min(prod(static_shape(h.output.shape)[2:]) for h in heads)
    fit = sorted(((b, p) for b, p in list_tiles() if p <= least), key=lambda t: _estimate_cost(heads, *t))[:2]
    return [(("blocks", b), ("pixels", p), ("tile", n)) for b, p in fit for n in _TILES]


def split_layer(layer: Layer) -> tuple[list[Head], Layer]:
    """The convolutions, sorted by input channels, descending (the last items are the smallest), and the moves with their constants."""
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


def _make_moves_and_runs(view: Layer, out: str, pitches: dict[int, int]) -> tuple[Moves, list[Run]]:
    """The moves over images stored channels last with these pitches, and the runs (result rows per pixel range). Raises Refused."""
    places = [i for i, t in enumerate(view.inputs) if t is not None and not t.is_constant]
    moves = Moves(view, dict.fromkeys(places, "nhwc"), out, pitches={i: pitches[k] for k, i in enumerate(places)})
    found = runs(moves, [pitches[k] for k in range(len(places))])
    images = sum(static_shape(view.needs(i).shape)[0] for i in places)
    if len(found) > _MAX_RUNS * images:
        raise Refused(f"the rows form {len(found)} runs, of at most {_MAX_RUNS} per image")
    return moves, found


def _estimate_cost(heads: list[Head], blocks: int, pixels: int) -> float:
    """Multiplications and loads of all levels, in vectors."""
    total, lanes = 0.0, get_registers().lanes
    for h in heads:
        _, channels, *sides = static_shape(h.output.shape)
        groups, tiles = -(-channels // (blocks * lanes)), -(-prod(sides) // pixels)
        total += static_shape(h.weights.shape)[1] * groups * tiles * (blocks * pixels + blocks + pixels)
    return total

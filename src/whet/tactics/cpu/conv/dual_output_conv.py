"""Two 1x1 convolutions of one image by one kernel (_pointwise_ir.py): a tile is read once for the output channels of both.

Convolutions with few channels are bound by reading the image: 32 channels, 160x160, to 16 and 16, one thread of a Cascade Lake: 0.79 to 0.67 ms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, Tensor, find_symbols, static_shape
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Stream, count_stored_bytes, tactic
from whet.tactics._fused import get_source_index, get_weight_and_bias, with_outer_inputs
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Step
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import find_faster_type
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._blocked_conv import find_activation
from whet.tactics.cpu.conv._pointwise_ir import Variant, emit_pointwise_ir
from whet.tactics.cpu.conv._pointwise_ir import list_tiles as list_register_tiles
from whet.tactics.cpu.conv.pointwise_conv import Pointwise, fits_first_cache, group_weights, strip_tiles
from whet.tactics.cpu.onednn._kernel import is_static, to_f32

_POINTWISE = Pointwise()


@dataclass(frozen=True)
class Branch:
    """One of the two convolutions."""

    weights: Tensor
    bias: Tensor | None
    channels: int

    @property
    def blocks(self) -> int:
        """Blocks of output channels."""
        return -(-self.channels // get_registers().lanes)

    @property
    def key(self) -> str:
        """Digests of weights and biases."""
        return "|".join("" if t is None else t.constant().digest for t in (self.weights, self.bias))


@dataclass(frozen=True)
class DualOutput:
    """Both convolutions, the epilogue of each, and the index of the image among the layer's inputs."""

    branches: tuple[Branch, Branch]
    steps: tuple[Step, ...]
    x: int

    @property
    def blocks(self) -> int:
        """Blocks of output channels of both results together."""
        return sum(w.blocks for w in self.branches)


class DualOutputKernel:
    """A planned layer; its packed operand holds weights and biases of both convolutions in groups of `blocks` of output channels."""

    serial_work = 1 << 18  # multiplications

    scratch, rtol, deterministic = 0, 1e-5, True

    def __init__(self, layer: Layer, signature: Signature, dual_output: DualOutput, blocks: int, count: int) -> None:
        images, taps, *sides = static_shape(layer.needs(dual_output.x).shape)
        tile, plane, groups, lanes = dict(list_register_tiles())[blocks], prod(sides), dual_output.blocks // blocks, get_registers().lanes
        tiles = -(-plane // tile)
        items = images * groups * tiles
        branches, whole = dual_output.branches, dual_output.blocks
        self.x = dual_output.x
        self.threads = min(count, items) if images * plane * taps * sum(w.channels for w in branches) > self.serial_work else 1
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        sizes = [branches[0].blocks, plane, -(-taps // lanes), whole, taps, tiles, groups, strip_tiles(tile, tiles, taps)]
        self.sizes = [*sizes, items, -(-items // self.threads)]
        key = f"{branches[0].key} {branches[1].key}|forked {blocks} {lanes}"
        nbytes = groups * (taps + 1) * blocks * lanes * 4
        self.packed = (Packed(key, nbytes, lambda: pack_weights(branches, groups, blocks).view(np.uint8), storable=True),)
        fits = fits_first_cache(blocks * lanes, tile, taps)
        variant = Variant(blocks, tile, lanes, dual_output.steps, jit.has("avx512dq"), fits, two_outputs=True)
        self.ir = jit.generate_lazily(emit_pointwise_ir, variant)
        self.implementation = f"{blocks * lanes} channels x {tile} pixels of both"

    def enqueue(self, args: Args, stream: Stream) -> None:
        context = [args.inputs[self.x], args.packed[0], *args.outputs, *self.sizes]
        operands = {0: ("input", self.x), 2: ("output", 0), 3: ("output", 1)}
        stream.record(jit.ParallelCall(jit.load_function(self.ir, "pointwise"), context, operands, self.threads, self.implementation))


@tactic
class DualOutputConv(CompiledTactic):
    ops = ("*",)
    composites = ("DualOutputConv",)
    what = "two convolutions of one image"
    needs_registers = True

    def why_not(self, layer: Layer) -> str | None:
        reason = super().why_not(layer)
        branches = split_branches(layer) if reason is None else reason
        return branches if isinstance(branches, str) else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        branches, sides = split_branches(layer), layer.outputs[0].shape[2:]
        if isinstance(branches, str):
            return branches
        if find_faster_type(permitted):
            return "the separate convolutions may be faster in the permitted 16-bit floats"
        if any(find_symbols(d) for d in sides):
            return "images of unknown sizes"
        return self.unavailable() or why_not_size(branches.blocks, prod(map(int, sides)))

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        branches = split_branches(layer)
        if isinstance(branches, str) or not is_static(layer):
            return []
        stored = get_registers().stored
        return [Signature(tuple(stored if i == branches.x else None for i in range(len(layer.inputs))), (stored, stored))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        branches = split_branches(layer)
        if isinstance(branches, str):
            return branches
        return self.unavailable() or why_not_size(branches.blocks, prod(static_shape(layer.outputs[0].shape)[2:]))

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        branches = split_branches(layer)
        return [] if isinstance(branches, str) else list_tiles(branches.blocks, prod(static_shape(layer.outputs[0].shape)[2:]))

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> DualOutputKernel:
        branches = split_branches(layer)
        if isinstance(branches, str):
            raise PlanRefused(branches)
        if config not in self.configs(layer, signature, backend):
            raise PlanRefused(f"{dict(config)} is not a tile for {branches.blocks} blocks of channels and images of {layer.outputs[0].shape}")
        return DualOutputKernel(layer, signature, branches, int(dict(config)["blocks"]), backend.threads)


def list_tiles(blocks: int, pixels: int) -> list[Config]:
    """Configurations for `blocks` blocks of all results together and images of `pixels` pixels."""
    return [(("blocks", b),) for b, p in sorted(list_register_tiles()) if blocks % b == 0 and p <= pixels and (b > 1 or blocks % 2)]


def why_not_size(blocks: int, pixels: int) -> str | None:
    """The reason why no tile fits, or None."""
    return None if list_tiles(blocks, pixels) else "the image has fewer pixels than the smallest tile"


def split_branches(layer: Layer) -> DualOutput | str:
    """The parts of the layer, or the reason why the kernel does not support it."""
    body = layer.regions["body"]
    if len(body.layers) != 2 or len(layer.outputs) != 2 or any(o is not x.outputs[0] for o, x in zip(body.outputs, body.layers, strict=True)):
        return "the body is not two convolutions"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    parts = [with_outer_inputs(part, outer) for part in body.layers]
    reason = next((why for part in parts if (why := _POINTWISE.why_not(part)) is not None), None)
    if reason is not None:
        return reason
    images, steps = [part.needs(get_source_index(part)) for part in parts], [find_activation(part) for part in parts]
    if isinstance(steps[0], str):
        return steps[0]
    if images[0] is not images[1] or steps[0] != steps[1]:
        return "the two convolutions read different images, or have different epilogues"
    first, second = (Branch(*get_weight_and_bias(part), int(part.outputs[0].shape[1])) for part in parts)
    place = next((i for i, t in enumerate(layer.inputs) if t is images[0]), None)
    return "the image is computed within the layer" if place is None else DualOutput((first, second), steps[0], place)


def pack_weights(branches: Sequence[Branch], groups: int, blocks: int, taps: slice = slice(None), biased: bool = True) -> np.ndarray:
    """The channels of all branches, each padded to whole blocks with zeros, packed as by pointwise_conv.py; of the input channels `taps`, and with
    zero biases unless `biased`."""
    arrays = [to_f32(w.weights).reshape(w.channels, -1)[:, taps] for w in branches]
    fill = [(0, w.blocks * get_registers().lanes - w.channels) for w in branches]
    biases = [np.zeros(w.channels, np.float32) if w.bias is None or not biased else to_f32(w.bias).reshape(-1) for w in branches]
    rows = np.concatenate([np.pad(a, (f, (0, 0))) for a, f in zip(arrays, fill, strict=True)])
    return group_weights(rows, np.concatenate([np.pad(b, f) for b, f in zip(biases, fill, strict=True)]), groups, blocks * get_registers().lanes)

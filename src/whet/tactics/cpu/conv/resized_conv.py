"""1x1 convolutions of an upsampled image concatenated with another one, f32 (_pointwise_ir.py): the upsampled one is convolved at its small size.

Nearest-neighbour resizing copies pixels, so the convolution of the small image can be computed first and copied instead: the accumulators for the
other image start from it. With a factor of two in both directions the small image takes a quarter of the work, and neither the resized nor the
concatenated image is written to memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, Tensor, find_symbols, static_shape
from whet.ops import run_layer
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Stream, count_stored_bytes, tactic
from whet.tactics._fused import get_source_index, get_weight_and_bias, with_outer_inputs
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Step
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import find_faster_type
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._blocked_conv import find_activation
from whet.tactics.cpu.conv._pointwise_ir import STEP, Variant, emit_pointwise_ir
from whet.tactics.cpu.conv._pointwise_ir import list_tiles as list_register_tiles
from whet.tactics.cpu.conv.dual_output_conv import Branch, list_tiles, pack_weights, split_branches, why_not_size
from whet.tactics.cpu.conv.pointwise_conv import Pointwise, fits_first_cache, strip_tiles
from whet.tactics.cpu.onednn._kernel import is_static

_POINTWISE = Pointwise()


@dataclass(frozen=True)
class Image:
    """One of the concatenated images: its index among the layer's inputs, its channels, and the first of them in the concatenation."""

    place: int
    tensor: Tensor
    channels: int
    first: int

    @property
    def taps(self) -> slice:
        """Its part of the weights' input channels."""
        return slice(self.first, self.first + self.channels)

    @property
    def pixels(self) -> int:
        return prod(map(int, self.tensor.shape[2:]))


@dataclass(frozen=True)
class ResizedInput:
    """The parts of a layer: the image that `resize` upsamples, the other one, the convolutions (one or two) and the epilogue of each."""

    resize: Layer
    small: Image
    large: Image
    branches: tuple[Branch, ...]
    steps: tuple[Step, ...]

    @property
    def blocks(self) -> int:
        """Blocks of output channels of all results together."""
        return sum(w.blocks for w in self.branches)


class ResizedKernel:
    """Two launches: the convolution of the small image, with biases, into scratch; then that of the other image, with these initial accumulators.

    Packed operands are both images' weights, and for each pixel the offset of its counterpart in the scratch.
    """

    serial_work = 1 << 18  # multiplications

    rtol, deterministic = 1e-5, True

    def __init__(self, layer: Layer, signature: Signature, resized: ResizedInput, blocks: int, count: int) -> None:
        images, tile, groups = static_shape(layer.outputs[0].shape)[0], dict(list_register_tiles())[blocks], resized.blocks // blocks
        lanes = get_registers().lanes
        self.found, two = resized, len(resized.branches) > 1
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        self.scratch = images * resized.blocks * resized.small.pixels * lanes * 4
        self.sizes, self.threads = [], []
        for image in (resized.small, resized.large):
            plane, taps, tiles = image.pixels, image.channels, -(-image.pixels // tile)
            items = images * groups * tiles
            threads = min(count, items) if images * plane * taps * resized.blocks * lanes > self.serial_work else 1
            out = resized.branches[0].blocks if two and image is resized.large else resized.blocks
            self.sizes.append([plane, -(-taps // lanes), out, taps, tiles, groups, strip_tiles(tile, tiles, taps), items, -(-items // threads)])
            self.threads.append(threads)
        shapes = [static_shape(t.shape)[2:] for t in (resized.small.tensor, resized.large.tensor)]
        key = f"places|{sorted(resized.resize.attrs.items())} {shapes} {lanes}"
        table = Packed(key, resized.large.pixels * 4, lambda: compute_source_offsets(resized.resize, lanes).view(np.uint8))
        self.packed = (_pack_weights(resized, resized.small, blocks, True), _pack_weights(resized, resized.large, blocks, False), table)
        has_avx512dq = jit.has("avx512dq")
        small = Variant(blocks, tile, lanes, (), has_avx512dq, fits_first_cache(blocks * lanes, tile, resized.small.channels))
        self.small_ir = jit.generate_lazily(emit_pointwise_ir, small)
        fetch = fits_first_cache(blocks * lanes, tile, resized.large.channels)
        large = Variant(blocks, tile, lanes, resized.steps, has_avx512dq, fetch, two_outputs=two, has_initial=True)
        self.large_ir = jit.generate_lazily(emit_pointwise_ir, large)
        self.implementation = f"{blocks * lanes} channels x {tile} pixels, upsampled after"

    def enqueue(self, args: Args, stream: Stream) -> None:
        def record(ir: str | jit.Generated, context: list[int], operands: dict[int, tuple[str, int]], k: int) -> None:
            stream.record(jit.ParallelCall(jit.load_function(ir, "pointwise"), context, operands, self.threads[k], self.implementation))

        small, large = self.found.small.place, self.found.large.place
        first, second, offsets = args.packed
        record(self.small_ir, [args.inputs[small], first, args.scratch, *self.sizes[0]], {0: ("input", small)}, 0)
        pixels, taken, out, *rest = self.sizes[1]
        initial = [args.scratch, offsets, self.found.small.pixels * get_registers().lanes]
        operands = {0: ("input", large), 2: ("output", 0)}
        if len(args.outputs) == 1:
            context = [args.inputs[large], second, *args.outputs, *initial, pixels, taken, out, *rest]
        else:
            operands[3] = "output", 1
            context = [args.inputs[large], second, *args.outputs, out, *initial, pixels, taken, self.found.blocks, *rest]
        record(self.large_ir, context, operands, 1)


def _pack_weights(resized: ResizedInput, image: Image, blocks: int, biased: bool) -> Packed:
    """All results' weights of one image, in groups of `blocks`."""
    groups, lanes = resized.blocks // blocks, get_registers().lanes
    key = f"{' '.join(w.key for w in resized.branches)}|resized {blocks} {lanes} {image.taps} {biased}"
    nbytes = groups * (image.channels + 1) * blocks * lanes * 4
    return Packed(key, nbytes, lambda: pack_weights(resized.branches, groups, blocks, image.taps, biased).view(np.uint8), storable=True)


@tactic
class ResizedConv(CompiledTactic):
    ops = ("*",)
    composites = ("ResizedConv",)
    what = "1x1 convolutions of an upsampled image concatenated with another one"
    needs_registers = True

    def why_not(self, layer: Layer) -> str | None:
        reason = super().why_not(layer)
        resized = split_layer(layer) if reason is None else reason
        return resized if isinstance(resized, str) else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        resized = split_layer(layer)
        if isinstance(resized, str):
            return resized
        if find_faster_type(permitted):
            return "the separate convolutions may be faster in the permitted 16-bit floats"
        if any(find_symbols(d) for x in (resized.small, resized.large) for d in x.tensor.shape[2:]):
            return "images of unknown sizes"
        return self.unavailable() or _why_not_size(resized)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        resized = split_layer(layer)
        if isinstance(resized, str) or not is_static(layer):
            return []
        stored = get_registers().stored
        inputs = tuple(stored if i in (resized.small.place, resized.large.place) else None for i in range(len(layer.inputs)))
        return [Signature(inputs, (stored,) * len(resized.branches))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        resized = split_layer(layer)
        return resized if isinstance(resized, str) else self.unavailable() or _why_not_size(resized)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        resized = split_layer(layer)
        return [] if isinstance(resized, str) else list_tiles(resized.blocks, resized.small.pixels)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ResizedKernel:
        resized = split_layer(layer)
        if isinstance(resized, str):
            raise PlanRefused(resized)
        if config not in self.configs(layer, signature, backend):
            raise PlanRefused(f"{dict(config)} is not a tile for {resized.blocks} blocks of channels and images of {resized.small.tensor.shape}")
        return ResizedKernel(layer, signature, resized, int(dict(config)["blocks"]), backend.threads)


def _why_not_size(resized: ResizedInput) -> str | None:
    """The reason why images of these sizes are not supported, or None."""
    if resized.small.pixels >= resized.large.pixels:
        return "the resized image is not larger"
    return why_not_size(resized.blocks, resized.small.pixels)


def split_layer(layer: Layer) -> ResizedInput | str:
    """The parts of the layer, or the reason why the kernel does not support it."""
    body = layer.regions["body"]
    if [x.op for x in body.layers[:2]] != ["Resize", "Concat"] or len(body.layers) != 3 or body.outputs != list(body.layers[2].outputs):
        return "the body is not Resize, Concat and convolutions"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    resize, join, reader = (with_outer_inputs(x, outer) for x in body.layers)
    if any(t is not None for t in resize.inputs[1:]):
        return "sizes or scales are not attributes"
    if resize.needs(0).shape[:2] != resize.outputs[0].shape[:2]:
        return "the batch or the channels are resized"
    read = _match_convolutions(reader, join.outputs[0])
    if isinstance(read, str):
        return read
    branches, steps = read
    images, first = [], 0
    for t in join.inputs:
        assert t is not None
        own = resize.needs(0) if t is resize.outputs[0] else t
        place = next((i for i, x in enumerate(layer.inputs) if x is own), None)
        if place is None:
            return "an image is computed within the layer"
        images.append(Image(place, own, int(t.shape[1]), first))
        first += images[-1].channels
    if odd := next((x.channels for x in images if x.channels % STEP), None):
        return f"{odd} channels: it takes multiples of {STEP}"
    small, large = images if join.inputs[0] is resize.outputs[0] else images[::-1]
    return ResizedInput(resize, small, large, branches, steps)


def _match_convolutions(reader: Layer, joined: Tensor) -> tuple[tuple[Branch, ...], tuple[Step, ...]] | str:
    """The convolutions of the concatenated images and their epilogue, or the reason why the kernel does not support them."""
    if reader.composite == "DualOutputConv":
        branches = split_branches(reader)
        if isinstance(branches, str):
            return branches
        return (branches.branches, branches.steps) if reader.inputs[branches.x] is joined else "the convolutions read another image"
    if (reason := _POINTWISE.why_not(reader)) is not None:
        return reason
    steps = find_activation(reader)
    if isinstance(steps, str):
        return steps
    if reader.inputs[get_source_index(reader)] is not joined:
        return "the convolution reads another image"
    return (Branch(*get_weight_and_bias(reader), int(reader.outputs[0].shape[1])),), steps


def compute_source_offsets(resize: Layer, lanes: int) -> np.ndarray:
    """For each pixel of the resized image the offset of its source pixel, in floats of a block of `lanes` channels. i32, flat."""
    shape = static_shape(resize.needs(0).shape)
    numbers = np.broadcast_to(np.arange(prod(shape[2:]), dtype=np.float64).reshape(shape[2:]), shape)
    (got,) = run_layer(resize, [numbers])
    return (got[0, 0].reshape(-1) * lanes).astype(np.int32)

"""1x1 convolutions of an enlarged image joined to another one, f32, by the kernel of pointwise.py: the enlarged one is convolved while it is small.

Nearest only picks pixels, so sums of an image's pixels may be picked in place of the pixels: sums of the other image begin there. Twice the size in
both directions leaves a quarter of the work for that image, which is neither enlarged in memory nor joined to the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import BF16, DType, Layer, Tensor, static_shape, symbols
from whet.ops import run_layer
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Stream, stored_bytes, tactic
from whet.tactics._fused import constants_of, seen, source_place
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu.conv._blocked_conv import STORED, steps_of
from whet.tactics.cpu.conv._pointwise_ir import STEP, TILES, Variant, pointwise_ir
from whet.tactics.cpu.conv.dual_output_conv import Way, forked, packed, tiles_that_fit, unfit
from whet.tactics.cpu.conv.pointwise_conv import Pointwise, near, strip
from whet.tactics.cpu.onednn._kernel import static

_ONE = Pointwise()


@dataclass(frozen=True)
class Image:
    """One of the joined images: which of the layer's inputs it is, its channels and where they begin among the joined ones."""

    place: int
    tensor: Tensor
    channels: int
    first: int

    @property
    def taps(self) -> slice:
        """Of the weights' input channels its own."""
        return slice(self.first, self.first + self.channels)

    @property
    def pixels(self) -> int:
        return prod(map(int, self.tensor.shape[2:]))


@dataclass(frozen=True)
class Resized:
    """A layer taken apart: the image that `resize` enlarges, the other one, the convolutions (one or two) and what follows each of them."""

    resize: Layer
    small: Image
    large: Image
    ways: tuple[Way, ...]
    steps: tuple[str, ...]

    @property
    def blocks(self) -> int:
        """Of 16 channels, of all results behind each other."""
        return sum(w.blocks for w in self.ways)


class ResizedKernel:
    """Two launches: sums of the small image, with biases, into scratch; then those of the other image, which begin there.

    Packed operands are both images' weights, and for each pixel the place of what it begins at.
    """

    serial_work = 1 << 18  # multiplications

    rtol, deterministic = 1e-5, True

    def __init__(self, layer: Layer, signature: Signature, found: Resized, blocks: int, count: int) -> None:
        images, tile, groups = static_shape(layer.outputs[0].shape)[0], dict(TILES)[blocks], found.blocks // blocks
        self.found, two = found, len(found.ways) > 1
        self.inputs, self.outputs = stored_bytes(layer, signature)
        self.scratch = images * found.blocks * found.small.pixels * LANES * 4
        self.sizes, self.threads = [], []
        for image in (found.small, found.large):
            plane, taps, tiles = image.pixels, image.channels, -(-image.pixels // tile)
            items = images * groups * tiles
            threads = min(count, items) if images * plane * taps * found.blocks * LANES > self.serial_work else 1
            out = found.ways[0].blocks if two and image is found.large else found.blocks
            self.sizes.append([plane, -(-taps // LANES), out, taps, tiles, groups, strip(tile, tiles, taps), items, -(-items // threads)])
            self.threads.append(threads)
        shapes = [static_shape(t.shape)[2:] for t in (found.small.tensor, found.large.tensor)]
        table = Packed(f"places|{sorted(found.resize.attrs.items())} {shapes}", found.large.pixels * 4, lambda: picked(found.resize).view(np.uint8))
        self.packed = (_weights(found, found.small, blocks, True), _weights(found, found.large, blocks, False), table)
        has_avx512dq = jit.has("avx512dq")
        self.before = pointwise_ir(Variant(blocks, tile, (), has_avx512dq, near(blocks, tile, found.small.channels)))
        fetch = near(blocks, tile, found.large.channels)
        self.behind = pointwise_ir(Variant(blocks, tile, found.steps, has_avx512dq, fetch, two_outputs=two, has_initial=True))
        self.implementation = f"own:{blocks * LANES} channels x {tile} pixels, enlarged behind"

    def enqueue(self, args: Args, stream: Stream) -> None:
        def record(ir: str, context: list[int], operands: dict[int, tuple[str, int]], k: int) -> None:
            stream.record(jit.ParallelCall(jit.address(ir, "pointwise"), context, operands, self.threads[k], self.implementation))

        small, large = self.found.small.place, self.found.large.place
        first, second, places = args.packed
        record(self.before, [args.inputs[small], first, args.scratch, *self.sizes[0]], {0: ("input", small)}, 0)
        pixels, taken, out, *rest = self.sizes[1]
        begun = [args.scratch, places, self.found.small.pixels * LANES]
        operands = {0: ("input", large), 2: ("output", 0)}
        if len(args.outputs) == 1:
            context = [args.inputs[large], second, *args.outputs, *begun, pixels, taken, out, *rest]
        else:
            operands[3] = "output", 1
            context = [args.inputs[large], second, *args.outputs, out, *begun, pixels, taken, self.found.blocks, *rest]
        record(self.behind, context, operands, 1)


def _weights(found: Resized, image: Image, blocks: int, biased: bool) -> Packed:
    """All results' weights of one image, in groups of `blocks`."""
    groups = found.blocks // blocks
    key = f"{' '.join(w.key for w in found.ways)}|resized {blocks} {image.taps} {biased}"
    nbytes = groups * (image.channels + 1) * blocks * LANES * 4
    return Packed(key, nbytes, lambda: packed(found.ways, groups, blocks, image.taps, biased).view(np.uint8))


@tactic
class ResizedConv(CompiledTactic):
    ops = ("*",)
    composites = ("ResizedConv",)
    what = "1x1 convolutions of an enlarged image joined to another one"
    needs_avx512 = True

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        found = resized(layer) if said is None else said
        return found if isinstance(found, str) else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        found = resized(layer)
        if isinstance(found, str):
            return found
        if BF16 in permitted and jit.has("avx512_bf16"):
            return "its parts may be faster in the 16-bit floats that are permitted"
        if any(symbols(d) for x in (found.small, found.large) for d in x.tensor.shape[2:]):
            return "images of unknown sizes"
        return self.unavailable() or _unfit(found)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        found = resized(layer)
        if isinstance(found, str) or not static(layer):
            return []
        inputs = tuple(STORED if i in (found.small.place, found.large.place) else None for i in range(len(layer.inputs)))
        return [Signature(inputs, (STORED,) * len(found.ways))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        found = resized(layer)
        return found if isinstance(found, str) else self.unavailable() or _unfit(found)

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        found = resized(layer)
        return [] if isinstance(found, str) else tiles_that_fit(found.blocks, found.small.pixels)

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ResizedKernel:
        found = resized(layer)
        if isinstance(found, str):
            raise PlanRefused(found)
        if config not in self.configs(layer, signature, backend):
            raise PlanRefused(f"{dict(config)} is no tile of {found.blocks} blocks of channels for images of {found.small.tensor.shape}")
        return ResizedKernel(layer, signature, found, int(dict(config)["blocks"]), backend.threads)


def _unfit(found: Resized) -> str | None:
    """Why images of these sizes cannot be computed."""
    if found.small.pixels >= found.large.pixels:
        return "the image becomes no larger"
    return unfit(found.blocks, found.small.pixels)


def resized(layer: Layer) -> Resized | str:
    """The layer taken apart, or why the kernel is not for it."""
    body = layer.regions["body"]
    if [x.op for x in body.layers[:2]] != ["Resize", "Concat"] or len(body.layers) != 3 or body.outputs != list(body.layers[2].outputs):
        return "the body is no enlarged image, its join with another one and what reads that"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    resize, join, reader = (seen(x, outer) for x in body.layers)
    if any(t is not None for t in resize.inputs[1:]):
        return "sizes or scales are no attributes"
    if resize.needs(0).shape[:2] != resize.outputs[0].shape[:2]:
        return "samples or channels are enlarged"
    read = _convolutions(reader, join.outputs[0])
    if isinstance(read, str):
        return read
    ways, steps = read
    images, first = [], 0
    for t in join.inputs:
        assert t is not None
        own = resize.needs(0) if t is resize.outputs[0] else t
        place = next((i for i, x in enumerate(layer.inputs) if x is own), None)
        if place is None:
            return "an image is made within the layer"
        images.append(Image(place, own, int(t.shape[1]), first))
        first += images[-1].channels
    if odd := next((x.channels for x in images if x.channels % STEP), None):
        return f"{odd} channels: it takes multiples of {STEP}"
    small, large = images if join.inputs[0] is resize.outputs[0] else images[::-1]
    return Resized(resize, small, large, ways, steps)


def _convolutions(reader: Layer, joined: Tensor) -> tuple[tuple[Way, ...], tuple[str, ...]] | str:
    """The convolutions of the joined images, and what follows each of them; or why the kernel is not for them."""
    if reader.composite == "DualOutputConv":
        found = forked(reader)
        if isinstance(found, str):
            return found
        return (found.ways, found.steps) if reader.inputs[found.x] is joined else "the convolutions read another image"
    if (reason := _ONE.why_not(reader)) is not None:
        return reason
    steps = steps_of(reader)
    if steps is None or reader.inputs[source_place(reader)] is not joined:
        return "the convolution reads another image"
    return (Way(*constants_of(reader), int(reader.outputs[0].shape[1])),), steps[0]


def picked(resize: Layer) -> np.ndarray:
    """For each pixel of the enlarged image the place of the one that it is picked from, in floats of a block of 16 channels. i32, flat."""
    shape = static_shape(resize.needs(0).shape)
    numbers = np.broadcast_to(np.arange(prod(shape[2:]), dtype=np.float64).reshape(shape[2:]), shape)
    (got,) = run_layer(resize, [numbers])
    return (got[0, 0].reshape(-1) * LANES).astype(np.int32)

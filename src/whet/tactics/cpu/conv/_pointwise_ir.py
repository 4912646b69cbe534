"""1x1 convolution in blocks of channels, as LLVM IR: a tile of pixels by blocks of output channels in registers, then the epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, INT64, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_float_chain
from whet.tactics.cpu._llvm.registers import LINE, get_registers
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

_TILES = {32: ((3, 8), (2, 12), (4, 6), (1, 24), (5, 5)), 16: ((3, 4), (2, 6), (1, 12))}
"""By the number of registers, (blocks of output channels, pixels) of a tile. Its accumulators leave registers for the weights of each block and, with
16 registers, for one value of the image: only AVX-512 multiplies by a value in memory."""
MOST = 5
STEP = 4  # input channels per iteration of the inner loop
_ADDRESSES = ("source", "weights", "target")
_SIZES = ("pixels", "input_blocks", "output_blocks", "taps", "tiles", "groups", "strip", "items", "share")
"""Pixels of an image; blocks of channels in and out; input channels; tiles of an image, groups of output blocks; tiles of a strip,
which all groups process before the next strip; samples * groups * tiles; items per thread."""
_SECOND = ("second", "second_block")
"""With two results: the address of the second, and the index of its first block."""
_INITIAL = ("initial", "offsets", "initial_plane")
"""With initial accumulators from another image: its address, the offset of each pixel's source there (i32, in floats), floats per block."""


@dataclass(frozen=True)
class Variant:
    """The compile-time parameters of a kernel.

    `prefetch_tile`: prefetches the same block of channels of the next tile, not the next block of the same tile. `two_outputs`: the last blocks
    belong to another result. `has_initial`: accumulators start from pixels of another image, not from the biases. `in_place`: the residual is
    overwritten by the result, so that no pixel may be computed twice.
    """

    blocks: int
    pixels: int
    lanes: int  # of a vector: channels of a block
    steps: tuple[Step, ...]  # the epilogue; its residual is an image as large as the result
    has_avx512dq: bool
    prefetch_tile: bool = False
    two_outputs: bool = False
    has_initial: bool = False
    in_place: bool = False

    @property
    def has_residual(self) -> bool:
        return any(s.reads_residual for s in self.steps)


def list_tiles() -> tuple[tuple[int, int], ...]:
    """(blocks of output channels, pixels) of the tiles that fit the registers of this CPU."""
    return _TILES[get_registers().count]


def list_context_words(variant: Variant) -> tuple[str, ...]:
    """Names of the context's words, in order: addresses, then sizes."""
    optional = ((variant.has_residual, ("added",)), (variant.two_outputs, _SECOND), (variant.has_initial, _INITIAL))
    return (*_ADDRESSES, *(word for is_there, words in optional if is_there for word in words), *_SIZES)


@cache
def emit_pointwise_ir(variant: Variant) -> str:
    """`pointwise(context)`.

    Weights are packed in groups of `blocks`: for each input channel and block its output channels, then the biases. An image has at least
    `pixels` pixels: its last tile overlaps the previous one.
    """
    module = Module()
    with parallel_kernel(module, "pointwise", list_context_words(variant), "items") as (f, words):
        _Kernel(f, words, variant).emit()
    return str(module)


def add_channels(f: Function, x: Pointer, weights: Pointer, blocks: int, pixels: int, sums: list[Value]) -> list[Value]:
    """The accumulators (all pixels of a block before those of the next) after STEP input channels of pixels in blocks of as many channels as an
    accumulator has."""
    sums, lanes = list(sums), sums[0].lanes
    for u in range(STEP):
        vectors = [weights.load((u * blocks + j) * lanes, lanes) for j in range(blocks)]
        for p in range(pixels):
            number = x.load(p * lanes + u).broadcast(lanes)
            for j in range(blocks):
                sums[j * pixels + p] = f.fma(number, vectors[j], sums[j * pixels + p])
            f.scheduling_barrier()
    return sums


class _Kernel:
    """The body of the function that works on some items: tiles of a group, in strips of an image."""

    def __init__(self, f: Function, words: SimpleNamespace, variant: Variant) -> None:
        self.f, self.w, self.variant = f, words, variant

    def emit(self) -> None:
        f, w, v = self.f, self.w, self.variant
        activations, lanes = Activations(f, v.has_avx512dq, v.lanes), v.lanes
        source, weights, target = (word.as_pointer(FLOAT) for word in (w.source, w.weights, w.target))
        second = w.second.as_pointer(FLOAT) if v.two_outputs else None
        added = w.added.as_pointer(FLOAT) if v.has_residual else None
        plane = w.pixels * lanes
        last_pixel = w.pixels - v.pixels
        sample, out_sample = w.input_blocks * plane, w.output_blocks * plane
        taps_size = w.taps * (v.blocks * lanes)
        group_size = taps_size + v.blocks * lanes
        iterations = w.taps // STEP
        with f.loop(w.begin, w.end, carried=self._find_first_item()) as items:
            tile, group, n, *_ = items.values
            pixel = f.minimum(tile * v.pixels, last_pixel)
            offset = pixel * lanes
            x = source.at(n * sample + offset)
            group_weights = weights.at(group * group_size)
            biases = group_weights.at(taps_size)
            first_block = group * v.blocks
            y_offset = n * out_sample + first_block * plane + offset
            y = target.at(y_offset)
            if v.has_initial:
                start = self._load_initial(n, first_block, pixel)
            else:
                start = [bias for bias in (biases.load(j * lanes, lanes) for j in range(v.blocks)) for _ in range(v.pixels)]
            with f.loop(0, iterations, carried=start, at_least_once=True) as inner:
                inner.carry(*self._iteration(f.opaque(inner.index), x, group_weights, plane, inner.values))
            for j in range(v.blocks):
                out = y.at(plane * j) if second is None else self._output(target, second, n, first_block + j, plane, offset)
                other = None if added is None else added.at(y_offset).at(plane * j)
                sums = inner.results[j * v.pixels : (j + 1) * v.pixels]
                if v.in_place:
                    self._store_rest(activations, sums, out, other, tile * v.pixels - pixel)
                else:
                    self._store(activations, sums, out, other)
            items.carry(*self._find_next_item(*items.values))

    def _store(self, activations: Activations, sums: list[Value], out: Pointer, added: Pointer | None, first: int = 0) -> None:
        """The epilogue of a block's pixels from `first` on."""
        lanes = self.variant.lanes
        for p in range(first, len(sums)):
            residual = None if added is None else added.load(p * lanes, lanes)
            out.store(emit_float_chain(self.f, activations, self.variant.steps, sums[p], residual), p * lanes)

    def _store_rest(self, activations: Activations, sums: list[Value], out: Pointer, added: Pointer | None, done: Value) -> None:
        """The same without the first `done` pixels, which the tile before computes."""
        with self.f.when(done.equals(0)):
            self._store(activations, sums, out, added)
        for p in range(1, len(sums)):
            with self.f.when((done > 0) & (done < p + 1)):
                self._store(activations, sums[: p + 1], out, added, p)

    def _iteration(self, index: Value, x: Pointer, weights: Pointer, plane: Value, sums: list[Value]) -> list[Value]:
        """Adds STEP input channels."""
        f, v = self.f, self.variant
        iterations = v.lanes // STEP  # of a block
        block, within = index // iterations, index % iterations
        x_now = x.at(block * plane + within * STEP)
        if v.blocks == 1:
            x_now = f.opaque_pointer(x_now)
        weights_now = weights.at(index * (STEP * v.blocks * v.lanes))
        if v.blocks < MOST:  # more leave no register for the lines' addresses
            lines = -(-v.pixels * STEP // LINE)  # of an iteration, so that a block's iterations prefetch all of them
            following = x_now if v.prefetch_tile else self._find_next_block(x, block, plane)
            following = following.at(within * (lines * LINE))
            for k in range(lines):
                following.prefetch((v.pixels * v.lanes if v.prefetch_tile else 0) + k * LINE)
            f.scheduling_barrier()
        return add_channels(f, x_now, weights_now, v.blocks, v.pixels, sums)

    def _find_next_block(self, x: Pointer, block: Value, plane: Value) -> Pointer:
        """The tile's pixels in the next block of channels; after the last one the next tile's in the first."""
        following = block + 1
        return x.at(self.f.select(following < self.w.input_blocks, following * plane, self.variant.pixels * self.variant.lanes))

    def _load_initial(self, n: Value, first_block: Value, pixel: Value) -> list[Value]:
        """The initial accumulators of an item: gathered pixels of the other image."""
        w, v = self.w, self.variant
        image = w.initial.as_pointer(FLOAT).at(n * (w.output_blocks * w.initial_plane) + first_block * w.initial_plane)
        blocks = [image.at(w.initial_plane * j) for j in range(v.blocks)]
        offsets = w.offsets.as_pointer(INT32).at(pixel)
        start: dict[tuple[int, int], Value] = {}
        for p in range(v.pixels):
            offset = offsets.load(p).convert("sext", INT64)
            for j in range(v.blocks):
                start[j, p] = blocks[j].load(offset, v.lanes)
        return [start[j, p] for j in range(v.blocks) for p in range(v.pixels)]

    def _output(self, first: Pointer, second: Pointer, n: Value, block: Value, plane: Value, offset: Value) -> Pointer:
        """The address of an item's block, in the first result or the second one."""
        f, w = self.f, self.w
        in_second = block >= w.second_block
        base = f.select_pointer(in_second, second, first)
        begin, end = f.select(in_second, w.second_block, 0), f.select(in_second, w.output_blocks, w.second_block)
        return base.at((n * (end - begin) + (block - begin)) * plane).at(offset)

    # An item is a tile of a group of a sample. Tiles form strips, each of which all groups process: the next item is the strip's next tile, else its
    # first one for the next group, else the next strip, else the next sample. Divisions are slow, so only the first item is found by them.

    def _find_first_item(self) -> list[Value]:
        """Tile, group, sample, and begin and end of the strip of the item w.begin."""
        f, w = self.f, self.w
        of_sample = w.tiles * w.groups
        n, in_sample = w.begin // of_sample, w.begin % of_sample
        of_strip = w.strip * w.groups
        strip, in_strip = in_sample // of_strip * w.strip, in_sample % of_strip
        end = f.minimum(strip + w.strip, w.tiles)
        length = end - strip
        group = in_strip // length
        return [strip + in_strip % length, group, n, strip, end]

    def _find_next_item(self, tile: Value, group: Value, n: Value, strip: Value, end: Value) -> list[Value]:
        f, w = self.f, self.w
        tile = tile + 1
        group_done = tile.equals(end)
        group = group + group_done.convert("zext", INT64)
        strip_done = group.equals(w.groups)
        group = f.select(strip_done, f.value(0), group)
        strip = f.select(strip_done, end, strip)
        sample_done = strip.equals(w.tiles)
        n = n + sample_done.convert("zext", INT64)
        strip = f.select(sample_done, f.value(0), strip)
        end = f.minimum(strip + w.strip, w.tiles)
        return [f.select(group_done, strip, tile), group, n, strip, end]

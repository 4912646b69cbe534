"""Base classes of the compiled f32 convolutions in blocks of channels, and how their output channels and pixels are tiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Stream, count_stored_bytes
from whet.tactics._fused import find_epilogue_steps, get_root_layer, get_source_index, get_weight_and_bias, outer_input
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Step, is_silu, keeps_zeros, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.onednn._kernel import is_static, list_runtime_tensors


@dataclass(frozen=True)
class Tile:
    """The part of a launch: `groups` of `blocks` of `lanes` output channels, after the `first` blocks, in tiles of `pixels`."""

    blocks: int
    pixels: int
    groups: int
    lanes: int
    first: int = 0

    @property
    def channels(self) -> slice:
        """Its output channels; the layer may have fewer."""
        return slice(self.first * self.lanes, (self.first + self.groups * self.blocks) * self.lanes)


UNEVEN_BLOCKS = (2, 3)  # used if no count from 2 to 4 divides the blocks: with more, weights are read from L2 for fewer pixels


def block_counts(blocks: int, most: Sequence[int]) -> list[int]:
    """The possible numbers of blocks per tile, of `most`: divisors of `blocks`, and if none of them is from 2 to 4, also counts that leave a
    remainder for a second launch."""
    whole = [b for b in most if blocks % b == 0 and b > 1]
    mixed = [] if any(b <= 4 for b in whole) else [b for b in UNEVEN_BLOCKS if b in most and b < blocks]
    return sorted({*whole, *mixed}) or [1]


def list_launches(layer: Layer, sizes: Mapping[str, int]) -> list[Tile] | None:
    """The launches of a config: groups of "blocks" in tiles of "pixels", and the remaining blocks in tiles of "rest" pixels. None if the config is
    for another number of channels."""
    lanes = get_registers().lanes
    blocks, left = divmod(-(-static_shape(layer.outputs[0].shape)[1] // lanes), sizes["blocks"])
    if not blocks or (left > 0) != ("rest" in sizes):
        return None
    launches = [Tile(sizes["blocks"], sizes["pixels"], blocks, lanes)]
    return launches if not left else [*launches, Tile(left, sizes["rest"], 1, lanes, blocks * sizes["blocks"])]


@dataclass
class Launch:
    """A launch: its code, the sizes in its context (last: items and items per thread), its threads, and the byte offset of its output channels in the
    result and in the addend."""

    ir: str | jit.Generated
    sizes: list[int]
    threads: int
    shift: int


class ConvKernel(ABC):
    """A planned convolution, with a launch and a packed operand (weights and biases) for each tile. Contexts hold the addresses of the image, the
    packed operand, the result and the addend, then sizes."""

    scratch, rtol, deterministic = 0, 1e-5, True
    name, serial_work = "", 1 << 18  # multiplications that one thread computes in the time of starting the others

    def __init__(self, layer: Layer, signature: Signature, tiles: Sequence[Tile], count: int) -> None:
        chain = match_chain(layer)
        assert not isinstance(chain, str), "the tactic takes no other layers"
        self.steps, self.added = chain.steps, chain.residual
        self.x = get_source_index(layer)
        self.weights, self.bias = get_weight_and_bias(layer)
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        images, channels, *sides = static_shape(layer.outputs[0].shape)
        taps, plane = prod(static_shape(self.weights.shape)[1:]), prod(sides)
        operands, self.parts = [], []
        for tile in tiles:
            ir, sizes, items, packed = self.launch(layer, signature, tile)
            channels_here = len(range(channels)[tile.channels])
            threads = min(count, items) if images * channels_here * plane * taps > self.serial_work else 1
            self.parts.append(Launch(ir, [*sizes, items, -(-items // threads)], threads, tile.first * tile.lanes * plane * 4))
            operands.append(packed)
        self.packed = tuple(operands)
        self.implementation = "" + " + ".join(f"{t.blocks * t.lanes} channels x {t.pixels} pixels" for t in tiles)

    @abstractmethod
    def launch(self, layer: Layer, signature: Signature, tile: Tile) -> tuple[str | jit.Generated, list[int], int, Packed]:
        """A tile's code, sizes, number of items, and packed weights and biases."""

    @property
    def constants(self) -> str:
        """Digests of weights and biases."""
        return "|".join("" if t is None else t.constant().digest for t in (self.weights, self.bias))

    def enqueue(self, args: Args, stream: Stream) -> None:
        for part, packed in zip(self.parts, args.packed, strict=True):
            context, operands = [args.inputs[self.x], packed, args.outputs[0] + part.shift], {0: ("input", self.x), 2: ("output", 0)}
            shifts = {2: part.shift}
            if self.added is not None:
                operands[3], shifts[3] = ("input", self.added), part.shift
                context.append(args.inputs[self.added] + part.shift)
            run = jit.load_function(part.ir, self.name)
            stream.record(jit.ParallelCall(run, context + part.sizes, operands, part.threads, self.implementation, shifts))


class FloatConvTactic(CompiledTactic):
    """A convolution in f32 with constant weights. Subclasses define the supported convolutions and epilogues."""

    ops = ("Conv",)

    @abstractmethod
    def why_not_conv(self, head: Layer) -> str | None:
        """The reason why the kernel does not support this convolution, or None."""

    @abstractmethod
    def why_not_epilogue(self, layer: Layer) -> str | None:
        """The reason why the kernel does not compute the layer's epilogue, or None."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if any(not layer.needs(i).is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if any(t.dtype != F32 for t in list_runtime_tensors(layer)):
            return "computes in 32-bit floating point"
        return self.why_not_epilogue(layer) or self.why_not_conv(head)


class ConvTactic(FloatConvTactic):
    """A convolution in blocks of channels."""

    needs_registers = True
    takes_residual = True

    kernel: type[ConvKernel]

    def why_not_epilogue(self, layer: Layer) -> str | None:
        chain = match_chain(layer)
        if isinstance(chain, str):
            return chain
        if chain.residual is not None and not self.takes_residual:
            return "adds no residual"
        if int(layer.outputs[0].shape[1]) % get_registers().lanes and not keeps_zeros(chain.steps):
            return "the epilogue of padding channels is not zero"
        return None

    def tiles(self, layer: Layer, sizes: Mapping[str, int]) -> list[Tile] | None:
        """The launches of a config; None if it is for another layer."""
        return list_launches(layer, sizes)

    @abstractmethod
    def fits(self, layer: Layer, signature: Signature, blocks: int, pixels: int) -> bool:
        """True if a tile fits the layer's shapes, which may differ from the tuned ones. Does not check the divisibility of the channels."""

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ConvKernel:
        sizes = {name: int(value) for name, value in config}
        tiles = self.tiles(layer, sizes)
        if tiles is None or not all(self.fits(layer, signature, t.blocks, t.pixels) for t in tiles):
            raise PlanRefused(f"a tile of {', '.join(f'{v} {n}' for n, v in sizes.items())} does not fit a result of {layer.outputs[0].shape}")
        return self.kernel(layer, signature, tiles, backend.threads)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        x, added, stored = get_source_index(layer), find_residual(layer), get_registers().stored
        inputs = tuple(stored if i in (x, added) else None for i in range(len(layer.inputs)))
        inplace = [] if added in (None, x) else [Signature(inputs, (stored,), ((added, 0),))]
        return [*inplace, Signature(inputs, (stored,))]


def find_residual(layer: Layer) -> int | None:
    """The index of the input that the epilogue reads."""
    chain = match_chain(layer)
    return None if isinstance(chain, str) else chain.residual


def find_activation(layer: Layer) -> tuple[Step, ...] | str:
    """The epilogue if it is SiLU, ReLU or nothing; else why the kernels do not compute it."""
    chain = match_chain(layer)
    if isinstance(chain, str) or len(chain.steps) > 1 or not all(is_silu(s) or s.op == "Relu" for s in chain.steps):
        return "takes convolutions with SiLU, ReLU or no epilogue"
    return chain.steps


def find_conv_steps(layer: Layer) -> tuple[tuple[str, ...], int | None] | None:
    """The epilogue as "Silu", "Relu" and "Add" (of one tensor of the result's shape, computed at run time), and the index of the added input;
    None for any other epilogue."""
    steps = find_epilogue_steps(layer)
    if steps is None:
        return None
    names: list[str] = []
    added = None
    for post in steps:
        name = "Silu" if post.op == "Swish" and float(post.attrs.get("alpha", 1.0)) == 1.0 else post.op
        if name == "Add" and post.other is not None and added is None and _is_residual(layer, post.other):
            added = post.other
        elif name not in ("Silu", "Relu") or post.other is not None:
            return None
        names.append(name)
    return tuple(names), added


def _is_residual(layer: Layer, i: int) -> bool:
    return not layer.needs(i).is_constant and layer.needs(i).shape == layer.outputs[0].shape

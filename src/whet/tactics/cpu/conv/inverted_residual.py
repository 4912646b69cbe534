"""MobileNet's inverted residual by one kernel: the expanded image, six times the size of the input, stays in the caches of a core.

By separate layers it is written and read twice. Where it does not fit the second-level caches, the depthwise convolution computes at a third of the
rate that it has there.

Measured: docs/notes/cpu_kernels.md (Inverted residuals).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, DType, Layer, Tensor, find_symbols, static_shape
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias, with_outer_inputs
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.packing import find_faster_type
from whet.tactics.cpu._llvm.registers import get_registers
from whet.tactics.cpu.conv._inverted_residual_ir import Form, Tile, count_band_inputs, emit_inverted_residual_ir, list_context_words
from whet.tactics.cpu.conv._pointwise_ir import STEP
from whet.tactics.cpu.conv.pointwise_conv import group_weights
from whet.tactics.cpu.onednn._kernel import is_static, list_runtime_tensors, to_f32

# By the number of registers: blocks of a tile -> pixels, such that accumulators and weights fit; pixels of a tile of the depthwise convolution
_MOST_PIXELS = {32: {1: 24, 2: 14, 3: 9, 4: 6, 5: 5}, 16: {1: 13, 2: 6, 3: 4}}
_FILTERED_PIXELS = {32: 14, 16: 12}
_WINDOWS = (3, 5, 7)
_THREAD_BYTES = 1 << 20  # of a thread's memory: half of a second-level cache
_LEAST_EXPANDED = 1 << 18  # bytes of an expanded image below which separate layers find it in the second-level caches
_BANDS = (1, 2, 4, 8, 16)  # bands per thread that are timed
_MOST_CONFIGS = 3


@dataclass(frozen=True)
class Part:
    """One of the three convolutions."""

    layer: Layer
    weights: Tensor
    bias: Tensor | None
    chain: Chain

    @property
    def key(self) -> str:
        """Digests of weights and biases."""
        return "|".join("" if t is None else t.constant().digest for t in (self.weights, self.bias))

    @property
    def array(self) -> np.ndarray:
        """The weights as a matrix [filters, taps]."""
        w = to_f32(self.weights)
        return w.reshape(len(w), -1)

    @property
    def biases(self) -> np.ndarray:
        return np.zeros(len(self.array), np.float32) if self.bias is None else to_f32(self.bias).reshape(-1)


@dataclass(frozen=True)
class Block:
    """The three convolutions, and the indices of the image and of the residual among the layer's inputs."""

    expansion: Part
    depthwise: Part
    projection: Part
    x: int
    residual: int | None

    @property
    def hidden_blocks(self) -> int:
        """Blocks of expanded channels."""
        return -(-int(self.expansion.weights.shape[0]) // get_registers().lanes)


class InvertedResidualKernel(CompiledKernel):
    """A planned layer for bands of `band` rows; packed operands are the weights and biases of the three convolutions."""

    serial_work = 1 << 18  # multiplications
    rtol = 1e-5

    def __init__(self, layer: Layer, signature: Signature, block: Block, band: int, count: int) -> None:
        self.block = block
        samples, channels, height, width = static_shape(layer.needs(block.x).shape)
        _, results, rows, columns = static_shape(layer.outputs[0].shape)
        window, stride, pads = _get_geometry(block.depthwise.layer)
        lanes = get_registers().lanes
        hidden = block.hidden_blocks * lanes
        work = samples * hidden * (height * width * channels + rows * columns * (window**2 + results))
        super().__init__(layer, signature, work, count)
        bands = -(-rows // band)
        self.items = samples * bands
        self.threads = min(self.threads, self.items)
        output_blocks = -(-results // lanes)
        expansion, projection = choose_tile(block.hidden_blocks, width), choose_tile(output_blocks, band * columns)
        group, output_group = expansion.blocks, projection.blocks
        steps = block.expansion.chain.steps, block.depthwise.chain.steps
        self.form = Form(
            window, stride, expansion, choose_filtered(columns), projection, lanes, *steps, block.residual is not None, jit.has("avx512dq")
        )
        line = _count_line(width, columns, window, stride, pads[1])
        thread_floats = lanes * count_thread_pixels(block.hidden_blocks, group, band, columns, line, window, stride)
        self.scratch = 4 * self.threads * thread_floats
        self.sizes = {
            "height": height, "width": width, "rows": rows, "columns": columns, "channels": channels, "input_blocks": -(-channels // lanes),
            "groups": block.hidden_blocks // group, "output_groups": output_blocks // output_group, "pad_top": pads[0], "pad_left": pads[1],
            "line": line, "band": band, "bands": bands, "thread_floats": thread_floats, "items": self.items,
        }  # fmt: skip
        self.packed = (
            _pack(
                f"{block.expansion.key}|expansion {group} {lanes}",
                hidden * (channels + 1),
                lambda: pack_product(block.expansion, hidden, channels, group * lanes),
            ),
            _pack(
                f"{block.depthwise.key}|inverted taps {lanes}",
                hidden * (window**2 + 1),
                lambda: pack_taps(block.depthwise, block.hidden_blocks, lanes),
            ),
            _pack(
                f"{block.projection.key}|projection {output_group} {lanes}",
                output_blocks * lanes * (hidden + 1),
                lambda: pack_product(block.projection, output_blocks * lanes, hidden, output_group * lanes),
            ),
        )
        self.implementation = f"bands of {band} rows, {group * lanes} channels at a time"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {
            "source": ("input", self.block.x), "target": ("output", 0), "scratch": args.scratch, **self.sizes,
        }  # fmt: skip
        if self.block.residual is not None:
            operands["added"] = ("input", self.block.residual)
        words = [operands[name] for name in list_context_words(self.form.has_residual) if name in operands]
        self.launch(stream, jit.generate_lazily(emit_inverted_residual_ir, self.form), "inverted_residual", args, words, self.items)


@tactic
class InvertedResidual(CompiledTactic):
    ops = ("*",)
    composites = ("InvertedResidual",)
    what = "an expansion, a depthwise convolution and a projection"
    needs_registers = True

    def why_not(self, layer: Layer) -> str | None:
        reason = super().why_not(layer)
        block = split_block(layer) if reason is None else reason
        return block if isinstance(block, str) else None

    def keeps_unfused(self, layer: Layer, permitted: Collection[DType]) -> str | None:
        block = split_block(layer)
        if isinstance(block, str):
            return block
        if find_faster_type(permitted):
            return "the separate convolutions may be faster in the permitted 16-bit floats"
        samples, _, *sides = layer.needs(block.x).shape
        if any(find_symbols(d) for d in sides):
            return "images of unknown sizes"
        expanded = (1 if find_symbols(samples) else int(samples)) * block.hidden_blocks * get_registers().lanes * prod(map(int, sides)) * 4
        if expanded < _LEAST_EXPANDED:
            return f"the expanded image has {expanded} bytes, which stay in the caches between separate layers"
        return self.unavailable()

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        block = split_block(layer)
        if isinstance(block, str) or not is_static(layer):
            return []
        stored = get_registers().stored
        return [Signature(tuple(stored if i in (block.x, block.residual) else None for i in range(len(layer.inputs))), (stored,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        block = split_block(layer)
        if isinstance(block, str):
            return block
        if reason := self.unavailable():
            return reason
        return None if self.configs(layer, signature, backend) else f"one row takes more than {_THREAD_BYTES} bytes of a thread's memory"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        """The largest bands that leave each thread as many as one of _BANDS, and whose memory fits."""
        block = split_block(layer)
        if isinstance(block, str):
            return []
        samples, _, rows, _ = static_shape(layer.outputs[0].shape)
        bands = {max(1, -(-rows * samples // (backend.threads * k))) for k in _BANDS}
        fitting = sorted((b for b in {min(b, rows) for b in bands} | {1} if self.fits(layer, block, b)), reverse=True)
        return [(("rows", b),) for b in fitting[:_MOST_CONFIGS]]

    def fits(self, layer: Layer, block: Block, band: int) -> bool:
        """True if a result has bands of so many rows, whose memory is within the limit."""
        _, _, rows, columns = static_shape(layer.outputs[0].shape)
        width = static_shape(layer.needs(block.x).shape)[3]
        window, stride, pads = _get_geometry(block.depthwise.layer)
        line, group = _count_line(width, columns, window, stride, pads[1]), choose_tile(block.hidden_blocks, width).blocks
        pixels = count_thread_pixels(block.hidden_blocks, group, band, columns, line, window, stride)
        return 1 <= band <= rows and 4 * get_registers().lanes * pixels <= _THREAD_BYTES

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> InvertedResidualKernel:
        block, band = split_block(layer), int(dict(config)["rows"])
        if isinstance(block, str):
            raise PlanRefused(block)
        if not self.fits(layer, block, band):
            raise PlanRefused(f"bands of {band} rows do not fit a result of {layer.outputs[0].shape}")
        return InvertedResidualKernel(layer, signature, block, band, backend.threads)


def split_block(layer: Layer) -> Block | str:
    """The parts of the layer, or the reason why the kernel does not support it."""
    body = layer.regions["body"]
    if len(body.layers) != 3 or body.outputs != [body.layers[2].output]:
        return "the body is not three convolutions"
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    parts = []
    for inner in body.layers:
        view = with_outer_inputs(inner, outer)
        part = _read_part(view)
        if isinstance(part, str):
            return part
        parts.append(part)
    if any(t.dtype != F32 for t in list_runtime_tensors(layer)):
        return "computes in 32-bit floating point"
    expansion, depthwise, projection = parts
    read = [p.layer.needs(get_source_index(p.layer)) for p in parts]
    if any(t is not inner.output for t, inner in zip(read[1:], body.layers, strict=False)):
        return "the convolutions do not read each other's results"
    if not all(_is_pointwise(p.layer) for p in (expansion, projection)):
        return "takes 1x1 convolutions with one group, no strides, no pads around the depthwise one"
    if int(expansion.weights.shape[1]) % STEP:
        return f"{expansion.weights.shape[1]} channels: it takes multiples of {STEP}"
    if reason := _why_not_depthwise(depthwise.layer):
        return reason
    if any(p.chain.residual is not None for p in (expansion, depthwise)):
        return "the expanded image has a residual"
    steps = projection.chain.steps
    if steps and (len(steps) > 1 or steps[0].op != "Add" or projection.chain.residual is None):
        return "the projection has an epilogue other than a residual"
    index = {id(t): i for i, t in enumerate(layer.inputs)}
    x = index.get(id(read[0]))
    residual = None if projection.chain.residual is None else index.get(id(projection.layer.needs(projection.chain.residual)))
    if x is None or (residual is None) != (projection.chain.residual is None):
        return "the image or the residual is computed within the layer"
    return Block(expansion, depthwise, projection, x, residual)


def _read_part(view: Layer) -> Part | str:
    """A convolution with constant weights and its epilogue, or why the kernel does not take it."""
    head = get_root_layer(view)
    if head.op != "Conv" or head.needs(0).type.rank != 4:
        return "takes convolutions of images"
    weights, bias = get_weight_and_bias(view)
    if not weights.is_constant or (bias is not None and not bias.is_constant):
        return "the weights are computed at run time"
    chain = match_chain(view)
    return chain if isinstance(chain, str) else Part(view, weights, bias, chain)


def _is_pointwise(view: Layer) -> bool:
    head = get_root_layer(view)
    a = head.attrs
    plain = a["group"] == 1 and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or (0,))
    return plain and tuple(head.needs(1).shape[2:]) == (1, 1)


def _why_not_depthwise(view: Layer) -> str | None:
    head = get_root_layer(view)
    w, a = head.needs(1), head.attrs
    if w.shape[1] != 1 or a["group"] != w.shape[0]:
        return "the second convolution is not depthwise"
    square = len(set(w.shape[2:])) == 1 and len(set(a.get("strides") or (1,))) == 1 and set(a.get("dilations") or (1,)) == {1}
    window, stride, pads = _get_geometry(view)
    if not square or window not in _WINDOWS or stride > 2 or max(pads) >= window:
        return "takes square windows of 3, 5 or 7, a stride of 1 or 2, pads smaller than the window"
    return None


def _get_geometry(view: Layer) -> tuple[int, int, tuple[int, ...]]:
    """Window, stride, and pads (top, left, bottom, right) of a depthwise convolution."""
    head = get_root_layer(view)
    return int(head.needs(1).shape[2]), int((head.attrs.get("strides") or (1,))[0]), tuple(head.attrs.get("pads") or (0,) * 4)


def choose_tile(blocks: int, pixels: int) -> Tile:
    """The tile of a pointwise convolution with the fewest loads and multiplications, for `blocks` blocks of filters and rows of `pixels` pixels."""

    def count_work(tile: Tile) -> int:
        return blocks // tile.blocks * -(-pixels // tile.pixels) * (tile.pixels * tile.blocks + tile.pixels + tile.blocks)

    tiles = (Tile(b, p) for b, most in _MOST_PIXELS[get_registers().count].items() if blocks % b == 0 for p in range(1, min(most, pixels) + 1))
    return min(tiles, key=lambda t: (count_work(t), -t.pixels))


def choose_filtered(columns: int) -> int:
    """Pixels of a tile of the depthwise convolution: the fewest are computed twice, then the tiles are large."""
    return min(range(1, min(_FILTERED_PIXELS[get_registers().count], columns) + 1), key=lambda p: (-(-columns // p) * (p + 2), -p))


def _count_line(width: int, columns: int, window: int, stride: int, pad_left: int) -> int:
    """Columns of an expanded row with its margins."""
    return max((columns - 1) * stride + window, pad_left + width)


def count_thread_pixels(hidden_blocks: int, group: int, band: int, columns: int, line: int, window: int, stride: int) -> int:
    """Pixels of one block in a thread's memory: the expanded rows of a group of blocks, and the depthwise results of all blocks."""
    return group * count_band_inputs(band, window, stride) * line + hidden_blocks * band * columns


def _pack(key: str, floats: int, make: Callable[[], np.ndarray]) -> Packed:
    return Packed(key, floats * 4, lambda: make().view(np.uint8), storable=True)


def pack_product(part: Part, filters: int, taps: int, group: int) -> np.ndarray:
    """A pointwise convolution's weights and biases in groups of `group` filters, for `filters` filters and `taps` channels; absent ones are zeros."""
    w = np.zeros((filters, taps), np.float32)
    w[: len(part.array), : part.array.shape[1]] = part.array
    bias = np.zeros(filters, np.float32)
    bias[: len(part.biases)] = part.biases
    return group_weights(w, bias, filters // group, group)


def pack_taps(part: Part, blocks: int, lanes: int) -> np.ndarray:
    """Per block of `lanes` channels: the taps, row by row, then the biases; absent channels are zeros. f32, flat."""
    rows = np.zeros((part.array.shape[1] + 1, blocks * lanes), np.float32)
    rows[:-1, : len(part.array)], rows[-1, : len(part.array)] = part.array.T, part.biases
    return np.ascontiguousarray(rows.reshape(len(rows), blocks, lanes).transpose(1, 0, 2)).reshape(-1)

"""3x3 convolutions without strides by Winograd's F(2, 3) and F(4, 3), f32: 2.25 and 4 times fewer multiplications than a direct convolution.

Direct convolutions of oneDNN, OpenVINO and ONNX Runtime are at the peak of the multipliers, so that only fewer multiplications are faster. Packed
weights are 1.8 and 4 times as large, so that layers of few tiles (batch 1) wait for memory: forms with raw weights transform them in the kernel, and
the form by matrices reads all weights once and prefetches them.
The error is a few times that of a direct convolution: it is relative to the largest value of a tile, and NaN and infinities reach all results
of their tiles. `strict_numerics` leaves the tactic out.

Measured: docs/notes/cpu_kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, count_stored_bytes, tactic
from whet.tactics._fused import get_root_layer, get_source_index, get_weight_and_bias
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.registers import AVX512, get_registers
from whet.tactics.cpu.conv._blocked_conv import FloatConvTactic, find_conv_steps
from whet.tactics.cpu.conv._winograd_ir import MOST_CHUNKS, MOST_PREFETCHING, OUTPUT_TILES, VECTORS, Form, emit_winograd_ir, list_context_words
from whet.tactics.cpu.conv._winograd_transform import TAPS, count_tile_inputs, transform_weights
from whet.tactics.cpu.onednn._kernel import is_static, to_f32

_RTOL = {2: 1e-5, 4: 2e-5}
_LINE = 16  # floats of a cache line
_CLEARLY = 1.3
_READ_COST = 16  # multiplications in the time that reading a weight from memory takes
_TRANSFORM_COST = 4  # multiplications in the time that computing a transformed weight takes
_SECOND_CACHE, _MEMORY = 1 << 20, 1 << 25  # bytes
_COMMON_ROWS = 3
_SPLIT = ("", " split", " split with copies", " by matrices")  # by the value of "split"
_COPIES = 2  # each thread has its own copy of the transformed inputs
_BY_MATRICES = 3
_MATRIX_TILES = 72  # of a block of the form by matrices: more do not stay in L2, of fewer the reads of the weights take longer than the products
_MATRIX_WEIGHTS = 1 << 22  # bytes of transformed weights from which on that form can be faster
_MOST_IDLE = 1.1  # the time of a launch over that of items that divide evenly among the threads
_MOST_COPIES = 16  # with more threads, computing the copies takes a notable part of the time
_GROUP = 8  # blocks of input channels of an item of the split form's input transform


def count_lanes() -> int:
    """Floats of a vector, and channels per block of the blocked format."""
    return get_registers().lanes


def get_row_limit() -> int:
    """Tiles that are multiplied at once: their accumulators for two vectors of output channels fill the registers."""
    return 14 if get_registers().count == AVX512.count else 6


@dataclass(frozen=True)
class Image:
    """An image's strides in floats, its blocks of channels, and the channels of the last one that do not fill it (0: they do)."""

    pixel: int
    row: int
    block: int
    sample: int
    blocks: int
    tail: int

    @staticmethod
    def of(tensor: Tensor, stored: str) -> Image:
        _, channels, height, width = static_shape(tensor.shape)
        blocks = -(-channels // count_lanes())
        if stored == "nhwc":
            return Image(channels, width * channels, count_lanes(), height * width * channels, blocks, channels % count_lanes())
        plane = height * width * count_lanes()
        return Image(count_lanes(), width * count_lanes(), plane, blocks * plane, blocks, 0)

    @property
    def whole_blocks(self) -> int:
        return self.blocks - (self.tail > 0)


class WinogradKernel:
    """A planned convolution; its packed operand holds the transformed weights and the biases."""

    deterministic, serial_work = True, 1 << 16

    def __init__(self, layer: Layer, signature: Signature, sizes: dict[str, int], count: int) -> None:
        m, head = sizes["m"], get_root_layer(layer)
        self.tile = m  # rows and columns of results that NaN or infinity in one of their inputs reaches
        fused = find_conv_steps(layer)
        assert fused is not None, "the tactic takes no other layers"
        steps, self.added = fused
        self.x, self.rtol = get_source_index(layer), _RTOL[m]
        self.inputs, self.outputs = count_stored_bytes(layer, signature)
        x = Image.of(head.needs(0), signature.needs(self.x).format)
        y = Image.of(layer.outputs[0], signature.outputs[0].format)
        samples, channels, rows, columns = static_shape(layer.outputs[0].shape)
        taken, height, width = static_shape(head.needs(0).shape)[1:]
        down, across = -(-rows // m), -(-columns // m)
        tiles = samples * down * across
        is_by_matrix, is_raw = sizes["split"] == _BY_MATRICES, bool(sizes.get("raw", 0))
        is_split = bool(sizes["split"]) and not is_by_matrix
        self.threads = count if tiles * taken * channels * count_tile_inputs(m) ** 2 > self.serial_work else 1
        blocks = -(-tiles // sizes["tiles"])
        if not sizes["split"]:
            blocks = min(-(-blocks // self.threads) * self.threads, tiles)
            self.threads = min(self.threads, blocks)
        copies = self.threads if sizes["split"] == _COPIES else 1
        counts = {tiles // blocks, -(-tiles // blocks)}
        capacity = max(counts)
        chunks = min(-(-capacity // get_row_limit()), MOST_PREFETCHING if is_by_matrix else MOST_CHUNKS) if is_raw or is_by_matrix else 0
        has_avx512dq = jit.has("avx512dq") and count_lanes() == 16
        form = Form(m, count_lanes(), _list_row_counts(counts), (x.tail, y.tail), steps, has_avx512dq, is_split, chunks, is_by_matrix)
        strips = -(-channels // form.width)
        panel_strips = min(sizes["strips"], strips)
        panels = -(-strips // panel_strips)
        matrices = count_tile_inputs(m) ** 2
        m_strips = strips if is_by_matrix else panel_strips
        v_pitch, m_pitch = _compute_pitch(x.blocks * capacity * form.lanes), _compute_pitch(m_strips * capacity * form.width)
        block_floats, u_pitch = v_pitch * matrices, _compute_pitch(form.lanes * form.width) if is_raw else 0
        m_floats = m_pitch * matrices
        private_floats = 0 if is_by_matrix else m_floats + u_pitch * 2 * count_tile_inputs(m) + (0 if is_split else block_floats)
        thread_floats = _compute_pitch(form.buffer_floats + private_floats)
        shared_floats = block_floats + m_floats if is_by_matrix else copies * blocks * block_floats if is_split else 0
        self.scratch = 4 * (self.threads * thread_floats + shared_floats)
        weights, bias = get_weight_and_bias(layer)
        packed_matrices = TAPS * TAPS if is_raw else matrices
        u_floats = packed_matrices * strips * x.blocks * form.lanes * form.width
        digests = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
        key = f"{digests}|winograd {0 if is_raw else m} {form.lanes} {panel_strips}"
        make = _Pack(weights, bias, 0 if is_raw else m, form.lanes, form.width, panel_strips)
        self.packed = (Packed(key, 4 * (u_floats + strips * form.width), make, storable=True),)
        top, left = (int(p) for p in (head.attrs.get("pads") or (0, 0))[:2])
        whole_vectors = channels // form.lanes if y.tail else y.blocks
        groups = -(-x.blocks // _GROUP)
        self._sizes = [
            x.pixel, x.row, x.block, x.sample, height, width, top, left, y.pixel, y.row, y.block, y.sample, rows, columns,
            across, down * across, tiles, blocks, capacity, x.blocks, x.whole_blocks, strips, panels, panel_strips,
            whole_vectors, v_pitch, m_pitch, u_pitch, block_floats, thread_floats, u_floats, _GROUP, groups, copies,
        ]  # fmt: skip
        self._launches = [("winograd", blocks, 0)]
        if is_split:
            self._launches = [("inputs", copies * tiles * groups, 0), ("products", panels * blocks, 0)]
        elif is_by_matrix:
            self._launches = []
            for block in range(blocks):
                of_block = (block + 1) * tiles // blocks - block * tiles // blocks
                items = {"inputs": of_block * groups, "matrices": matrices * panels, "outputs": -(-of_block // OUTPUT_TILES) * strips}
                self._launches += [(name, number, block) for name, number in items.items()]
        self._form = form
        how = _SPLIT[sizes["split"]] + (", raw weights" if is_raw else "")
        self.implementation = f"F({m},3) {capacity} tiles x {panel_strips * form.width} channels{how}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        context, operands = [args.inputs[self.x], *args.packed, args.outputs[0], args.scratch], {0: ("input", self.x), 2: ("output", 0)}
        if self.added is not None:
            operands[len(context)] = ("input", self.added)
            context.append(args.inputs[self.added])
        ir = jit.generate_lazily(emit_winograd_ir, self._form)
        for name, items, block in self._launches:
            words = [*context, *self._sizes, block, items, -(-items // self.threads)]
            assert len(words) == len(list_context_words(self._form.steps))
            stream.record(jit.ParallelCall(jit.load_function(ir, name), words, operands, self.threads, self.implementation))


@tactic
class Winograd(FloatConvTactic):

    def why_not_epilogue(self, layer: Layer) -> str | None:
        steps = find_conv_steps(layer)
        if steps is None or tuple(s for s in steps[0] if s != "Add") not in ((), ("Silu",), ("Relu",)):
            return "takes convolutions with SiLU, ReLU or no epilogue, and at most one residual"
        return None

    def why_not_conv(self, head: Layer) -> str | None:
        a = head.attrs
        if head.needs(0).type.rank != 4 or a["group"] != 1 or tuple(head.needs(1).shape[2:]) != (TAPS, TAPS):
            return "takes 3x3 convolutions of images with one group"
        if set(a.get("strides") or (1,)) != {1} or set(a.get("dilations") or (1,)) != {1} or max(a.get("pads") or (0,)) >= TAPS:
            return "takes no strides, no dilations, and pads smaller than the window"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        x, steps = get_source_index(layer), find_conv_steps(layer)
        assert steps is not None
        signatures = []
        for name in ("nhwc", f"nChw{count_lanes()}c"):
            image = Operand(name, F32)
            inputs = tuple(image if i in (x, steps[1]) else None for i in range(len(layer.inputs)))
            signatures += [Signature(inputs, (image,), ((steps[1], 0),))] if steps[1] not in (None, x) else []
            signatures.append(Signature(inputs, (image,)))
        return signatures

    def not_strict(self, layer: Layer, implementation: str) -> str | None:
        return "Winograd's transforms mix the values of a tile: errors are relative to its largest value, NaN reaches all of its results"

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> list[Config]:
        """Blocks of two and four times the tiles that are multiplied at once. Left out are the split form if all weights fit L2, the other form if
        they are read from memory, and forms that are clearly slower: borders of small images waste less of F(2, 3)'s tiles. Weights that do not
        fit L2 when transformed are also read raw, in blocks of four times the tiles; the form by matrices is for weights of several megabytes. The
        forms alternate, the cheapest by estimate first: a build
        times only the first configs of a layer with many options."""
        samples, channels, rows, columns = static_shape(layer.outputs[0].shape)
        products = channels * static_shape(get_root_layer(layer).needs(0).shape)[1]
        tiles = {m: samples * -(-rows // m) * -(-columns // m) for m in _RTOL}
        costs = {
            (m, raw): _estimate_cost(m, tiles[m], raw)
            for m in _RTOL for raw in (False, True) if not raw or _count_bytes(products, m) > _SECOND_CACHE
        }  # fmt: skip
        most, best = get_row_limit(), min(costs.values())
        forms: list[tuple[float, list[Config]]] = []
        splits: tuple[int, ...]
        for (m, raw), cost in costs.items():
            if cost > _CLEARLY * best:
                continue
            if raw:
                splits = (_COPIES if backend.threads <= _MOST_COPIES else 1, 0)
                forms.append((cost, [(("m", m), ("tiles", 4 * most), ("strips", 1), ("split", split), ("raw", 1)) for split in splits]))
                continue
            weights = _count_bytes(products, m)
            splits = tuple(split for split in (0, 1) if (weights > _SECOND_CACHE if split else weights < _MEMORY))
            blockings = [(split, n, strips) for split in splits for n, strips in ((2, 4), (4, 1))]
            forms.append((cost, [(("m", m), ("tiles", n * most), ("strips", strips), ("split", split)) for split, n, strips in blockings]))
        for m in _RTOL:
            if tiles[m] > most and _count_bytes(products, m) > _MATRIX_WEIGHTS:
                strips = choose_matrix_strips(-(-channels // (VECTORS * count_lanes())), m, backend.threads)
                config: Config = (("m", m), ("tiles", _MATRIX_TILES), ("strips", strips), ("split", _BY_MATRICES))
                forms.append((_estimate_matrix_cost(m, tiles[m]), [config]))
        by_cost = [form for _, form in sorted(forms, key=lambda x: x[0])]
        return [config for turn in zip_longest(*by_cost) for config in turn if config is not None]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> WinogradKernel:
        sizes = {name: int(value) for name, value in config}
        is_form = sizes.get("m") in _RTOL and min(sizes.get("tiles", 0), sizes.get("strips", 0)) > 0 and sizes.get("split") in range(len(_SPLIT))
        may_be_raw = is_form and sizes["strips"] == 1 and sizes["split"] != _BY_MATRICES
        if not is_form or sizes.get("raw", 0) not in ((0, 1) if may_be_raw else (0,)):
            raise PlanRefused(f"{sizes} is no form of the kernel")
        return WinogradKernel(layer, signature, sizes, backend.threads)


@dataclass(frozen=True)
class _Pack:
    """Packs weights and biases: per panel of `strips` strips of `width` output channels the n * n matrices, strip by strip; then the biases. Raw
    weights (`m` is 0) are packed strip by strip, the taps of a channel side by side."""

    weights: Tensor
    bias: Tensor | None
    m: int
    lanes: int
    width: int
    strips: int

    def __call__(self) -> np.ndarray:
        w = to_f32(self.weights)
        channels, taken = w.shape[:2]
        padded, count = -(-taken // self.lanes) * self.lanes, -(-channels // self.width)
        matrices = count_tile_inputs(self.m) ** 2 if self.m else TAPS * TAPS
        packed = np.zeros(matrices * padded * count * self.width + count * self.width, np.float32)
        at = 0
        for first in range(0, count, self.strips):  # panel by panel: the values in float64 stay in the caches
            strips = min(self.strips, count - first)
            part = w[first * self.width : (first + strips) * self.width]
            panel = packed[at : at + matrices * strips * padded * self.width]
            if self.m:
                u = transform_weights(part, self.m)
                _copy_strips(panel.reshape(matrices, strips, padded, self.width).swapaxes(1, 2), u)
            else:
                raw = part.reshape(len(part), taken, matrices).transpose(2, 1, 0)
                _copy_strips(panel.reshape(strips, padded, matrices, self.width).transpose(2, 1, 0, 3), raw)
            at += panel.size
        if self.bias is not None:
            packed[at : at + channels] = to_f32(self.bias).reshape(-1)
        return packed.view(np.uint8)


def _copy_strips(target: np.ndarray, values: np.ndarray) -> None:
    """Copies [matrix, input channel, output channel] to [matrix, input channel, strip, column]; both may have fewer channels than `target`."""
    width = target.shape[3]
    for k in range(target.shape[2]):
        part = values[:, :, k * width : (k + 1) * width]
        target[:, : part.shape[1], k, : part.shape[2]] = part


def _count_bytes(products: int, m: int) -> int:
    """Bytes of the transformed weights of `products` pairs of channels."""
    return 4 * products * count_tile_inputs(m) ** 2


def _estimate_cost(m: int, tiles: int, raw: bool) -> float:
    """Estimated cost of all tiles for a pair of channels, in multiplications: products, reads of the weights, and the transform of raw weights."""
    matrices = count_tile_inputs(m) ** 2
    read, transformed = (TAPS * TAPS, _TRANSFORM_COST * matrices) if raw else (matrices, 0)
    return float(matrices * tiles + _READ_COST * read + transformed)


def _estimate_matrix_cost(m: int, tiles: int) -> float:
    """The same for the form by matrices, which reads weights while it multiplies."""
    return float(count_tile_inputs(m) ** 2 * max(tiles, _READ_COST))


def choose_matrix_strips(strips: int, m: int, threads: int) -> int:
    """Strips of an item of the form by matrices: the most with which the items are divided nearly evenly among the threads."""
    matrices = count_tile_inputs(m) ** 2
    for panels in range(1, strips + 1):
        items = matrices * -(-strips // -(-strips // panels))
        if -(-items // threads) * threads <= _MOST_IDLE * items:
            return -(-strips // panels)
    return 1


def _list_row_counts(counts: set[int]) -> tuple[int, ...]:
    """The numbers of tiles that are multiplied at once in blocks of `counts` tiles. The few large ones of small registers are all included, so that
    layers share code."""
    needed, most = set(), get_row_limit()
    for count in counts:
        chunks = -(-count // most)
        needed |= {count // chunks, -(-count // chunks)}
    common = set(range(most - _COMMON_ROWS + 1, most + 1))
    return tuple(sorted(needed | common if needed <= common and most <= 2 * _COMMON_ROWS else needed))


def _compute_pitch(floats: int) -> int:
    """`floats` rounded up to an odd number of cache lines, so that equal offsets in consecutive matrices are in different cache sets."""
    return (-(-floats // _LINE) | 1) * _LINE

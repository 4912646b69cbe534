"""Planned launches of _indirect_ir.py: convolutions, products and poolings of channels-last values, on CPUs with vectors of any length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, Tensor, format_fits, static_shape
from whet.tactics._base import Args, Config, Kernel, Operand, Packed, PlanRefused, Signature, Stream
from whet.tactics._fused import get_source_index
from whet.tactics._quantized import Scale, match_quantized
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.byte_product import ByteProduct, choose_instruction
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic, get_integer_range
from whet.tactics.cpu.conv._indirect_ir import HEADER, Form, count_rows, count_thread_bytes, emit_indirect_ir, find_border, list_context_words
from whet.tactics.cpu.onednn._kernel import is_static, list_runtime_tensors, to_f32
from whet.tactics.cpu.onednn._quantized import drop_implied_bounds

_SECOND_CACHE = 1 << 17  # bytes of weights, and of a block's input, that stay in L2
_CACHED = 1 << 20  # bytes of weights that stay in a cache from one inference to the next
_ITEMS = 4  # per thread, if there are as many
_MOST_ROWS = 96  # pixels of a block
_FEW_CHANNELS = 4  # whose windows are copied
_GATHERED_STRIPS = 8  # of an item: copying windows takes as long as multiplying them by one strip
_MOST_PRODUCTS = 2**31 // (256 * 128)  # of 8-bit integers, which one 32-bit accumulator holds


def count_lanes() -> int:
    """Floats of this CPU's vectors: 512, 256 or 128 bits (NEON, SSE)."""
    return 16 if jit.has("avx512f") else 8 if jit.has("avx2") and jit.has("fma") else 4


@dataclass(frozen=True)
class Window:
    """The window of a result, along two axes, or three."""

    size: tuple[int, ...] = (1, 1)
    strides: tuple[int, ...] = (1, 1)
    dilations: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0)  # (front,) top, left; below 0: the first window begins inside the image


@dataclass(frozen=True)
class Places:
    """Where the results of a part of a larger image are: its sides, the steps from one result to the next along each axis, and the first one."""

    sides: tuple[int, ...]
    steps: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A kernel's sizes: samples, input and result images of two axes or three, groups, and a group's input and output channels."""

    samples: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    groups: int
    taken: int
    channels: int
    window: Window = Window()
    places: Places | None = None  # of the results, if they are not adjacent

    @property
    def pixels(self) -> int:
        return self.samples * prod(self.result)

    @property
    def taps(self) -> int:
        return prod(self.window.size)


@dataclass(frozen=True)
class Integers:
    """How the integers of a quantized layer are scaled: the input, the weights of each output channel, the result (None: f32), and the addend (None:
    f32, or absent)."""

    source: Scale
    weights: np.ndarray
    stores: Scale | None
    added: Scale | None = None


@dataclass(frozen=True)
class Weights:
    """A layer's weights and bias. `transposed`: they are [input, output]; `scattered`: those of a transposed convolution with so many groups. `taps`:
    the taps that are used, in the order of the window; all if None."""

    tensor: Tensor
    bias: Tensor | None
    transposed: bool = False
    scattered: int = 0
    taps: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """Digests of the tensors, and how they are used."""
        digests = "|".join("" if t is None else t.constant().digest for t in (self.tensor, self.bias))
        return f"{digests}|{self.transposed} {self.scattered} {self.taps}"

    def get_biases(self) -> np.ndarray | None:
        """A value per output channel."""
        return None if self.bias is None else to_f32(self.bias)

    def to_matrix(self, w: np.ndarray, is_product: bool) -> np.ndarray:
        """The values as [output channel, input channel of a group, tap], or [output channel, tap]."""
        if self.transposed:
            return w.T[:, :, None]
        if self.scattered:
            parts = w.reshape(self.scattered, len(w) // self.scattered, w.shape[1], -1)
            w = parts.swapaxes(1, 2).reshape(self.scattered * w.shape[1], parts.shape[1], -1)
        else:
            w = w.reshape(*w.shape[:2], -1)
        w = w if self.taps is None else w[:, :, list(self.taps)]
        return w if is_product else w.reshape(len(w), -1)


def as_image(sides: Sequence[int], row: int = 1) -> tuple[int, ...]:
    """Sizes along the axes of an image or a volume; a line is an image of one row."""
    return (row, int(sides[0])) if len(sides) == 1 else tuple(map(int, sides))


def _as_volume(sides: Sequence[int], slices: int = 1) -> tuple[int, int, int]:
    """Sizes along three axes; an image is a volume of one slice."""
    depth, height, width = (*(slices,) * (3 - len(sides)), *sides)
    return depth, height, width


class IndirectKernel(CompiledKernel):
    """A planned launch; the packed operand holds weights, biases and a line of zeros."""

    serial_work = 1 << 16  # multiplications

    def __init__(
        self, layer: Layer, signature: Signature, kind: str, problem: Problem, chain: Chain, x: int, weights: Weights | None, count: int,
        integers: Integers | None = None,
    ) -> None:  # fmt: skip
        """`integers`: the layer is quantized. Maxima of integers are not scaled, and need none."""
        p, n = problem, count_lanes()
        is_product = kind == "product"
        source, stored, added = _list_types(layer, signature, x, chain.residual)
        is_integer = source != "f32"
        super().__init__(layer, signature, p.pixels * p.taps * p.groups * p.channels * (p.taken if is_product else 1), count)
        self.rtol, self.x, self.residual = 1e-5 if stored == "f32" else 0.0, x, chain.residual
        vectors = 1 if p.channels <= n else 2
        width = vectors * n
        group_strips = -(-p.channels // width)
        strips = p.groups * group_strips
        is_plain = p.taps == 1 and p.window.pads == (0, 0) and _reads_inside(p)
        is_gathered = is_product and p.groups == 1 and p.taps > 1 and p.taken <= _FEW_CHANNELS
        instruction = choose_instruction(n) if is_integer and is_product else ""
        times = ByteProduct(instruction, n, source == "i8") if instruction else None
        depth = times.depth if times else 1
        at_once, inner = (1, p.taps * p.taken) if is_gathered else (p.taps, p.taken)  # taps, channels of the loops of a product
        strip_size = at_once * -(-inner // depth) * depth * width if is_product else p.taps * width
        pixel_size = p.groups * p.taken if is_product else p.channels
        size = 1 if is_integer else 4  # bytes of a value
        # items: the weights of some strips, and the input of a block of pixels, each in L2
        read = p.taps * p.taken if is_product else p.taps * width
        is_dense = is_product and is_plain and p.image == p.result
        rows = count_rows(n, is_dense)
        block = max(rows, min(_MOST_ROWS, p.pixels, _SECOND_CACHE // (size * read) // rows * rows))
        item_strips = max(1, min(strips, _SECOND_CACHE // (size * strip_size)))
        if is_gathered:
            item_strips = min(strips, max(item_strips, _GATHERED_STRIPS))
        while self.threads > 1 and -(-p.pixels // block) * -(-strips // item_strips) < _ITEMS * self.threads:
            if item_strips > 1:
                item_strips = -(-item_strips // 2)
            elif block > rows:
                block = max(rows, block // 2 // rows * rows)
            else:
                break
        blocks = -(-p.pixels // block)
        block = -(-p.pixels // blocks)  # a last block of few pixels would read the weights for them alone
        blocks = -(-p.pixels // block)
        sizes = {block, p.pixels - (blocks - 1) * block}
        self.form = Form(
            kind, n, vectors, _list_row_counts(sizes, rows), p.channels % n, chain.steps, is_plain, is_gathered, source, stored, added, instruction,
            inner % depth, len(p.image) > 2, p.places is not None, is_dense,
        )  # fmt: skip
        if is_dense and vectors == 2 and not is_integer and strips * strip_size * size > _CACHED:
            lines = self.form.iteration_lines
            self.form = replace(self.form, prefetched=min(lines, 1 << max(0, (lines * rows // p.pixels).bit_length())))

        own = count_thread_bytes(self.form, block, p.taps, p.taken)
        self.items = blocks * -(-strips // item_strips)
        self.threads = min(self.threads, self.items)
        self.scratch = own * self.threads
        bias_at = strips * strip_size * size if weights is not None else 0
        header_at = bias_at + 4 * self.form.lines * strips * width
        zeros_at = header_at + (4 * HEADER if is_integer else 0)
        (deep, height, wide), w, window = _as_volume(p.image), p.window, _as_volume(p.window.size)
        strides, steps, pads, result = _as_volume(w.strides), _as_volume(w.dilations), _as_volume(w.pads, 0), _as_volume(p.result)
        self.sizes = {
            "x_sample": deep * height * wide * pixel_size, "x_slice": height * wide * pixel_size, "x_row": wide * pixel_size, "x_pixel": pixel_size,
            "depth": deep, "height": height, "width": wide, "stride_z": strides[0], "stride_y": strides[1], "stride_x": strides[2],
            "step_z": steps[0], "step_y": steps[1], "step_x": steps[2], "pad_front": pads[0], "pad_top": pads[1], "pad_left": pads[2],
            "window_z": window[0], "window_y": window[1], "window_x": window[2], "channels": p.taken, "image_slices": result[0],
            "image_rows": result[1], "image_columns": result[2],
            "pixels": p.pixels, "block": block, "blocks": blocks, "y_pixel": p.groups * p.channels, "strips": strips,
            "group_strips": group_strips, "item_strips": item_strips, "group_channels": p.channels, "bias": bias_at, "header": header_at,
            "zeros": zeros_at, "thread_bytes": own, "items": self.items, **_find_places(p),
        }  # fmt: skip
        nbytes = zeros_at + size * pixel_size
        zero, shift = (integers.source.zero if integers else 0), (times.shift if times else 0)
        border = zero if kind in ("product", "channelwise", "padded_mean") else find_border(kind, source)

        def pack() -> np.ndarray:
            out = np.zeros(nbytes, np.uint8)
            out[zeros_at:] = np.full(pixel_size, border).astype({"f32": np.float32, "i8": np.int8, "u8": np.uint8}[source]).view(np.uint8)
            lines = np.zeros((strips, self.form.lines, width), np.float32)
            if weights is not None:
                w = weights.to_matrix(np.asarray(weights.tensor.array(), np.int8) if is_integer else to_f32(weights.tensor), is_product)
                packed = pack_weights(w, p, width, is_product, is_gathered, depth)
                out[:bias_at] = packed.view(np.uint8)
                if (biases := weights.get_biases()) is not None:
                    lines[:, -1] = _arrange(biases, p, width)
            if integers is not None:
                source_scale = integers.source.number
                if weights is not None:
                    start = -(zero + shift) * w.sum(axis=tuple(range(1, w.ndim)), dtype=np.int64)
                    lines[:, 0] = _arrange(start.astype(np.int32), p, width).view(np.float32)
                    lines[:, 1] = _arrange((source_scale * integers.weights.astype(np.float64)).astype(np.float32), p, width)
                else:
                    lines[:, 1:] = np.array([source_scale, -zero * source_scale], np.float32)[:, None]
                out[header_at:zeros_at] = np.array(_list_parameters(integers), np.float32).view(np.uint8)
            out[bias_at:header_at] = lines.view(np.uint8).reshape(-1)
            return out

        key = f"{'' if weights is None else weights.key}|indirect {kind} {width} {p.groups} {p.taken} {pixel_size}"
        if is_integer:
            key += f" {source}"
        if integers is not None:
            scales = (integers.source, integers.stores, integers.added)
            key += f" {instruction} {is_gathered} {[s and (s.key, s.dtype.name) for s in scales]} {integers.weights.tobytes().hex()}"
        self.packed = (Packed(key, nbytes, pack, storable=True),)
        self.implementation = f"{kind} {width} channels, {block} pixels x {item_strips}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), "scratch": args.scratch, **self.sizes}
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        words = [operands[name] for name in list_context_words(self.form)[:-2]]
        self.launch(stream, jit.generate_lazily(emit_indirect_ir, self.form), "indirect", args, words, self.items)


@dataclass(frozen=True)
class Parts:
    """A layer as the kernels see it: in floating point (`view`), its epilogue, and the scales of its integers, if it is quantized."""

    view: Layer
    chain: Chain
    integers: Integers | None = None


class IndirectTactic(CompiledTactic):
    """A tactic of these kernels, f32. They are there for builds without oneDNN, or on request."""

    opt_in = True
    instead_of = "ONEDNN"
    form = "nhwc"

    @abstractmethod
    def why_not_layer(self, layer: Layer) -> str | None:
        """The reason against a layer other than its types and epilogue, or None."""

    @abstractmethod
    def plan_kernel(self, parts: Parts, signature: Signature, threads: int) -> Kernel:
        """The kernel of a layer that `why_not` accepts."""

    def split(self, layer: Layer) -> Parts | str:
        """The layer's parts, or why the kernels do not compute it."""
        if reason := self.why_not_layer(layer):
            return reason
        if any(t.dtype != F32 for t in list_runtime_tensors(layer)):
            return "computes in 32-bit floating point"
        chain = match_chain(layer, takes_bias=self.may_add_row(layer))
        return chain if isinstance(chain, str) else Parts(layer, chain)

    def may_add_row(self, layer: Layer) -> bool:
        """True if the epilogue may begin with a constant for each output channel: the layer has no bias."""
        return False

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        parts = self.split(layer)
        return parts if isinstance(parts, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        parts = self.split(layer)
        if isinstance(parts, str) or not format_fits(self.form, layer.outputs[0].type.rank):
            return []
        read = (get_source_index(parts.view), parts.chain.residual)
        inputs = tuple(Operand(self.form, layer.needs(i).dtype) if i in read else None for i in range(len(layer.inputs)))
        return [Signature(inputs, (Operand(self.form, layer.outputs[0].dtype),))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> Kernel:
        parts = self.split(layer) if self.why_not(layer) is None else self.why_not(layer)
        if not isinstance(parts, Parts):
            raise PlanRefused(parts or "")
        return self.plan_kernel(parts, signature, backend.threads)


class QuantizedIndirectTactic(IndirectTactic):
    """The same for quantized layers: products of u8 or i8 by symmetric i8 weights, and means of integers."""

    quantized = True

    def split(self, layer: Layer) -> Parts | str:
        parts = match_quantized(layer)
        if isinstance(parts, str):
            return parts
        view = parts.view
        if reason := self.why_not_layer(view):
            return reason
        x, scales = parts.source_index(), dict(parts.reads)
        source = scales.pop(x, None)
        if source is None or source.scale.size != 1:
            return "takes one scale for the input"
        if parts.stores is not None and parts.stores.scale.size != 1:
            return "takes one scale for the result"
        if parts.stores is None and view.outputs[0].dtype != F32:
            return "stores 8-bit integers or 32-bit floats"
        factors = np.ones(1, np.float32)
        if "Pool" not in parts.head.op:
            _, w, _ = parts.operand_indices()
            weights = scales.pop(w, None)
            if weights is None or weights.zero or weights.dtype.name != "i8":
                return "takes symmetric i8 weights"
            shape = static_shape(view.needs(w).shape)
            if (prod(shape[1:]) if parts.head.op == "Conv" else max(shape)) > _MOST_PRODUCTS:
                return f"adds more than {_MOST_PRODUCTS} products"
            factors = weights.scale
        chain = match_chain(view, steps=drop_implied_bounds(parts))
        if isinstance(chain, str):
            return chain
        added = None if chain.residual is None else scales.pop(chain.residual, None)
        if scales or (added is not None and added.scale.size != 1):
            return "takes no integers besides its input, its weights and one residual"
        return Parts(view, chain, Integers(source, factors, parts.stores, added))


def pack_weights(w: np.ndarray, p: Problem, width: int, is_product: bool, is_gathered: bool = False, depth: int = 1) -> np.ndarray:
    """Strips of `width` output channels of a group, as in _indirect_ir.py, in elements of `depth` input channels; absent channels are zeros."""
    strips = -(-p.channels // width)
    if is_gathered:  # a window's values are the channels of one tap
        w = w.transpose(0, 2, 1).reshape(len(w), -1, 1)
    full = np.zeros((p.groups, strips * width, *w.shape[1:]), w.dtype)
    full[:, : p.channels] = w.reshape(p.groups, p.channels, *w.shape[1:])
    if not is_product:
        return np.ascontiguousarray(full.reshape(p.groups, strips, width, -1).transpose(0, 1, 3, 2)).reshape(-1)
    taken, taps = w.shape[1:]
    padded = np.zeros((p.groups, strips * width, -(-taken // depth) * depth, taps), w.dtype)
    padded[:, :, :taken] = full
    parts = padded.reshape(p.groups, strips, width, -1, depth, taps)
    return np.ascontiguousarray(parts.transpose(0, 1, 5, 3, 2, 4)).reshape(-1)


def _arrange(values: np.ndarray, p: Problem, width: int) -> np.ndarray:
    """A value per output channel, or one for all, as [strip, channel of the strip]; absent channels are zeros."""
    rows = np.zeros((p.groups, -(-p.channels // width) * width), values.dtype)
    rows[:, : p.channels] = np.broadcast_to(values.reshape(-1), (p.groups * p.channels,)).reshape(p.groups, p.channels)
    return rows.reshape(-1, width)


def _list_parameters(integers: Integers) -> list[float]:
    """The header of _indirect_ir.py."""
    stores, added = integers.stores, integers.added
    result = [0.0] * 4 if stores is None else [1 / stores.number, stores.zero, *get_integer_range(stores.dtype)]
    return result + ([0.0, 0.0] if added is None else [added.number, -added.zero * added.number])


def _list_types(layer: Layer, signature: Signature, x: int, residual: int | None) -> tuple[str, str, str]:
    """The stored types of the input, the result and the addend (f32 if there is none)."""
    return signature.needs(x).dtype.name, signature.outputs[0].dtype.name, "f32" if residual is None else signature.needs(residual).dtype.name


def _find_places(p: Problem) -> dict[str, int]:
    """Strides of the result in values, and the offset of the first one; {} if results are adjacent."""
    if p.places is None:
        return {}
    (deep, height, wide), steps, first = _as_volume(p.places.sides), _as_volume(p.places.steps), _as_volume(p.places.first, 0)
    column = p.groups * p.channels
    strides = (height * wide * column, wide * column, column)
    slice_, row, step = (s * n for s, n in zip(strides, steps, strict=True))
    at = sum(s * n for s, n in zip(strides, first, strict=True))
    return {"y_sample": deep * strides[0], "y_slice": slice_, "y_row": row, "y_column": step, "y_first": at}


def _reads_inside(p: Problem) -> bool:
    """True if no window extends past the end of the image."""
    w = p.window
    axes = zip(p.image, p.result, w.strides, w.size, w.dilations, w.pads, strict=True)
    return all((results - 1) * stride + (taps - 1) * step - pad < side for side, results, stride, taps, step, pad in axes)


def _list_row_counts(blocks: set[int], most: int) -> tuple[int, ...]:
    """The numbers of pixels computed at once in blocks of these sizes."""
    counts = set()
    for count in blocks:
        chunks = -(-count // most)
        counts |= {count // chunks, -(-count // chunks)}
    return tuple(sorted(counts))

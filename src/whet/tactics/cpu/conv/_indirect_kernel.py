"""Planned launches of _indirect_ir.py: convolutions, products and poolings of channels-last values, on CPUs with vectors of any length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream
from whet.tactics._fused import get_source_index
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.epilogue import Chain, match_chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.conv._indirect_ir import ROWS, Form, count_thread_bytes, emit_indirect_ir, list_context_words
from whet.tactics.cpu.onednn._kernel import is_static, list_runtime_tensors, to_f32

_SECOND_CACHE = 1 << 17  # bytes of weights, and of a block's input, that stay in L2
_ITEMS = 4  # per thread, if there are as many
_MOST_ROWS = 96  # pixels of a block
_FEW_CHANNELS = 4  # whose windows are copied


def count_lanes() -> int:
    """Floats of this CPU's vectors: 512, 256 or 128 bits (NEON, SSE)."""
    return 16 if jit.has("avx512f") else 8 if jit.has("avx2") and jit.has("fma") else 4


@dataclass(frozen=True)
class Window:
    """How results are computed from pixels; the size of an input image, and that of a result."""

    size: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilations: tuple[int, int] = (1, 1)
    pads: tuple[int, int] = (0, 0)  # top, left


@dataclass(frozen=True)
class Problem:
    """A kernel's sizes: samples, input and result images, groups, and a group's input and output channels."""

    samples: int
    image: tuple[int, int]
    result: tuple[int, int]
    groups: int
    taken: int
    channels: int
    window: Window = Window()

    @property
    def pixels(self) -> int:
        return self.samples * prod(self.result)

    @property
    def taps(self) -> int:
        return prod(self.window.size)


class IndirectKernel(CompiledKernel):
    """A planned launch; the packed operand holds weights, biases and a line of zeros."""

    serial_work = 1 << 16  # multiplications

    def __init__(
        self, layer: Layer, signature: Signature, kind: str, problem: Problem, chain: Chain, x: int, weights: tuple[Tensor, Tensor | None] | None,
        matrix: bool, count: int,
    ) -> None:  # fmt: skip
        p, n = problem, count_lanes()
        is_product = kind == "product"
        super().__init__(layer, signature, p.pixels * p.taps * p.groups * p.channels * (p.taken if is_product else 1), count)
        self.rtol, self.x, self.residual = 1e-5, x, chain.residual
        vectors = 1 if p.channels <= n else 2
        width = vectors * n
        group_strips = -(-p.channels // width)
        strips = p.groups * group_strips
        strip_floats = p.taps * width * (p.taken if is_product else 1)
        pixel_floats = p.groups * p.taken if is_product else p.channels
        # items: the weights of some strips, and the input of a block of pixels, each in L2
        read = p.taps * p.taken if is_product else p.taps * width
        block = max(ROWS, min(_MOST_ROWS, p.pixels, _SECOND_CACHE // (4 * read) // ROWS * ROWS))
        item_strips = max(1, min(strips, _SECOND_CACHE // (4 * strip_floats)))
        while self.threads > 1 and -(-p.pixels // block) * -(-strips // item_strips) < _ITEMS * self.threads:
            if item_strips > 1:
                item_strips = -(-item_strips // 2)
            elif block > ROWS:
                block = max(ROWS, block // 2 // ROWS * ROWS)
            else:
                break
        blocks = -(-p.pixels // block)
        sizes = {block, p.pixels - (blocks - 1) * block}
        is_plain = p.taps == 1 and p.window.pads == (0, 0) and _reads_inside(p)
        is_gathered = is_product and p.groups == 1 and p.taps > 1 and p.taken <= _FEW_CHANNELS
        self.form = Form(kind, n, vectors, _list_row_counts(sizes), p.channels % n, chain.steps, is_plain, is_gathered)
        own = count_thread_bytes(self.form, block, p.taps, p.taken)
        self.items = blocks * -(-strips // item_strips)
        self.threads = min(self.threads, self.items)
        self.scratch = own * self.threads
        bias_at = strips * strip_floats if weights is not None else 0
        zeros_at = bias_at + strips * width
        (height, wide), w = p.image, p.window
        self.sizes = {
            "x_sample": height * wide * pixel_floats, "x_row": wide * pixel_floats, "x_pixel": pixel_floats, "height": height, "width": wide,
            "stride_y": w.strides[0], "stride_x": w.strides[1], "step_y": w.dilations[0], "step_x": w.dilations[1], "pad_top": w.pads[0],
            "pad_left": w.pads[1], "window_y": w.size[0], "window_x": w.size[1], "channels": p.taken, "image_rows": p.result[0],
            "image_columns": p.result[1], "pixels": p.pixels, "block": block, "blocks": blocks, "y_pixel": p.groups * p.channels, "strips": strips,
            "group_strips": group_strips, "item_strips": item_strips, "group_channels": p.channels, "bias": bias_at, "zeros": zeros_at,
            "thread_bytes": own, "items": self.items,
        }  # fmt: skip
        border = -np.inf if kind == "max" else 0.0
        nbytes = 4 * (zeros_at + pixel_floats)

        def pack() -> np.ndarray:
            out = np.zeros(nbytes // 4, np.float32)
            out[zeros_at:] = border
            if weights is not None:
                out[:bias_at] = pack_weights(convert_to_matrix(to_f32(weights[0]), matrix, is_product), p, width, is_product)
                if weights[1] is not None:
                    rows = np.zeros((p.groups, group_strips * width), np.float32)
                    rows[:, : p.channels] = to_f32(weights[1]).reshape(p.groups, p.channels)
                    out[bias_at:zeros_at] = rows.reshape(-1)
            return out.view(np.uint8)

        digests = "" if weights is None else "|".join("" if t is None else t.constant().digest for t in weights)
        self.packed = (Packed(f"{digests}|indirect {kind} {matrix} {width} {p.groups} {p.taken} {pixel_floats}", nbytes, pack, storable=True),)
        self.implementation = f"{kind} {width} channels, {block} pixels x {item_strips}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), "scratch": args.scratch, **self.sizes}
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        words = [operands[name] for name in list_context_words(self.form.steps)[:-2]]
        self.launch(stream, jit.generate_lazily(emit_indirect_ir, self.form), "indirect", args, words, self.items)


class IndirectTactic(CompiledTactic):
    """A tactic of these kernels, f32. They are there for builds without oneDNN, or on request."""

    opt_in = True
    instead_of = "ONEDNN"
    operand = Operand("nhwc", F32)

    @abstractmethod
    def why_not_layer(self, layer: Layer) -> str | None:
        """The reason against a layer other than its types and epilogue, or None."""

    @abstractmethod
    def plan_kernel(self, layer: Layer, signature: Signature, chain: Chain, threads: int) -> IndirectKernel:
        """The kernel of a layer that `why_not` accepts, with its epilogue as `chain`."""

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer) or self.why_not_layer(layer):
            return reason
        if any(t.dtype != F32 for t in list_runtime_tensors(layer)):
            return "computes in 32-bit floating point"
        chain = match_chain(layer)
        return chain if isinstance(chain, str) else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        chain = match_chain(layer)
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape) or isinstance(chain, str):
            return []
        read = (get_source_index(layer), chain.residual)
        return [Signature(tuple(self.operand if i in read else None for i in range(len(layer.inputs))), (self.operand,))]

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return self.unavailable()

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> IndirectKernel:
        if reason := self.why_not(layer):
            raise PlanRefused(reason)
        chain = match_chain(layer)
        assert isinstance(chain, Chain), "why_not refuses other layers"
        return self.plan_kernel(layer, signature, chain, backend.threads)


def convert_to_matrix(w: np.ndarray, transposed: bool, is_product: bool) -> np.ndarray:
    """Weights as [output channel, input channel of a group, tap], or [output channel, tap]; `transposed`: they are [input, output]."""
    if not is_product:
        return w.reshape(len(w), -1)
    return w.T[:, :, None] if transposed else w.reshape(*w.shape[:2], -1)


def pack_weights(w: np.ndarray, p: Problem, width: int, is_product: bool) -> np.ndarray:
    """Strips of `width` output channels of a group, as in _indirect_ir.py; absent channels are zeros."""
    strips = -(-p.channels // width)
    full = np.zeros((p.groups, strips * width, *w.shape[1:]), np.float32)
    full[:, : p.channels] = w.reshape(p.groups, p.channels, *w.shape[1:])
    parts = full.reshape(p.groups, strips, width, *w.shape[1:])
    order: Sequence[int] = (0, 1, 4, 3, 2) if is_product else (0, 1, 3, 2)
    return np.ascontiguousarray(parts.transpose(order)).reshape(-1)


def _reads_inside(p: Problem) -> bool:
    """True if no window extends past the end of the image."""
    w = p.window
    axes = zip(p.image, p.result, w.strides, w.size, w.dilations, w.pads, strict=True)
    return all((results - 1) * stride + (taps - 1) * step - pad < side for side, results, stride, taps, step, pad in axes)


def _list_row_counts(blocks: set[int]) -> tuple[int, ...]:
    """The numbers of pixels computed at once in blocks of these sizes."""
    counts = set()
    for count in blocks:
        chunks = -(-count // ROWS)
        counts |= {count // chunks, -(-count // chunks)}
    return tuple(sorted(counts))

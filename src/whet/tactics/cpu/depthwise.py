"""Depthwise convolutions with SiLU behind them, f32 in blocks of 16 channels, by a kernel of our own: a few pixels of a row in registers.

For the same reason as pointwise.py: the taps are few, and oneDNN's SiLU costs as much as they do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.backends.cpu import threads
from whet.network import F32, Layer, Tensor, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, Tactic, anchor, operand_bytes, outer_input, tactic
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._depthwise_kernel import TILES, depthwise_ir
from whet.tactics.cpu._kernel import f32_of, static
from whet.tactics.cpu._silu_kernel import WIDE
from whet.tactics.cpu.pointwise import digest, ends_in_silu

_STORED = Operand("nChw16c", F32)
_WINDOWS = (3, 5, 7)
_SMALL = 1 << 16  # multiplications that one thread has done before the others are there


class DepthwiseKernel:
    """A planned convolution; its packed operand holds for each block of 16 channels the taps, row by row, and the biases."""

    scratch, rtol, deterministic = 0, 1e-5, True

    def __init__(self, layer: Layer, signature: Signature, tile: int, count: int) -> None:
        head = anchor(layer)
        places = [outer_input(layer, t) for t in (*head.inputs, None)[:3]]
        self.x = places[0]
        weights, bias = (None if p is None else layer.inputs[p] for p in places[1:])
        assert weights is not None
        self.inputs = tuple(0 if t is None else operand_bytes(t, o) for t, o in zip(layer.inputs, signature.inputs, strict=True))
        self.outputs = (operand_bytes(layer.outputs[0], signature.outputs[0]),)
        images, channels, rows, columns = static_shape(layer.outputs[0].shape)
        height, width = static_shape(head.inputs[0].shape)[2:]
        window, stride, pads = _geometry(head)
        items = images * channels // WIDE * rows
        self.threads = min(count, items) if items * WIDE * columns * window**2 > _SMALL else 1
        sizes = [height, width, rows, columns, channels // WIDE, *pads[:2], *_inside(layer)]
        self.sizes = [*sizes, items, -(-items // self.threads)]
        key = f"{digest(weights)}|{'' if bias is None else digest(bias)}|depthwise"
        self.packed = (Packed(key, channels * (window**2 + 1) * 4, lambda: packed(weights, bias).view(np.uint8)),)
        self.ir = depthwise_ir(window, stride, tile, _jit.has("avx512f"))
        self.implementation = f"own:{tile} pixels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        ask = threads.address("omp_get_thread_num") if self.threads > 1 else _jit.address(self.ir, "first")
        assert self.x is not None
        context = [args.inputs[self.x], args.packed[0], args.outputs[0], *self.sizes, ask]
        operands = {("input", self.x): 0, ("output", 0): 2}
        stream.record(_jit.ParallelCall(_jit.address(self.ir, "depthwise"), context, operands, self.threads, self.implementation))


@tactic
class Depthwise(Tactic):
    ops = ("Conv",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
        if said:
            return said
        head = anchor(layer)
        if any(not layer.inputs[i].is_constant for t in head.inputs[1:] if (i := outer_input(layer, t)) is not None):
            return "the weights are computed at run time"
        if not ends_in_silu(layer):
            return "is for convolutions with SiLU behind them, and nothing else: oneDNN has the others at the peak"
        w, a = head.inputs[1], head.attrs
        if head.inputs[0].type.rank != 4 or w.shape[1] != 1 or a["group"] != w.shape[0] or w.shape[0] % WIDE:
            return f"is for depthwise convolutions of images, channels in multiples of {WIDE}"
        window, stride, pads = _geometry(head)
        square = len(set(w.shape[2:])) == 1 and len(set(a.get("strides") or (1,))) == 1 and set(a.get("dilations") or (1,)) == {1}
        if not square or window not in _WINDOWS or stride > 2 or max(pads) >= window:
            return "takes square windows of 3, 5 or 7, a stride of 1 or 2, pads below the window"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer):
            return []
        x = outer_input(layer, anchor(layer).inputs[0])
        return [Signature(tuple(_STORED if i == x else None for i in range(len(layer.inputs))), (_STORED,))]

    def refuses(self, layer: Layer, signature: Signature, machine: Any) -> str | None:
        if not _jit.has("avx512f"):
            return "its sums need the 32 registers of AVX-512"
        return None if self.configs(layer, signature, machine) else f"fewer than {TILES[-1]} pixels of a row have all their taps within the image"

    def configs(self, layer: Layer, signature: Signature, machine: Any) -> list[Config]:
        left, right = _inside(layer)
        return [(("pixels", p),) for p in TILES if right - left >= p]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> DepthwiseKernel:
        return DepthwiseKernel(layer, signature, int(dict(config)["pixels"]), machine.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing: NaN and infinities give what the ops give."""
        return [{}]

    def library_version(self) -> str:
        return _jit.version()


def packed(weights: Tensor, bias: Tensor | None) -> np.ndarray:
    """Per block of 16 channels: the taps, row by row, then the biases. f32, flat."""
    w = f32_of(weights)
    channels = w.shape[0]
    b = np.zeros(channels, np.float32) if bias is None else f32_of(bias).reshape(channels)
    rows = np.concatenate([w.reshape(channels, -1).T, b[None]])  # [taps + 1, channels]
    return np.ascontiguousarray(rows.reshape(len(rows), channels // WIDE, WIDE).transpose(1, 0, 2)).reshape(-1)


def _geometry(head: Layer) -> tuple[int, int, tuple[int, ...]]:
    """Window, stride, and the pads (above, left, below, right)."""
    a = head.attrs
    return int(head.inputs[1].shape[2]), int((a.get("strides") or (1,))[0]), tuple(a.get("pads") or (0,) * 4)


def _inside(layer: Layer) -> tuple[int, int]:
    """The columns of the result from which and up to which every tap lies within the image."""
    head = anchor(layer)
    window, stride, pads = _geometry(head)
    width, columns = static_shape(head.inputs[0].shape)[3], static_shape(layer.outputs[0].shape)[3]
    left = -(-pads[1] // stride)
    return left, max(left, min(columns, (width - window + pads[1]) // stride + 1))

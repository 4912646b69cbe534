"""Planned products of 16-bit floats with constant weights in panels of 32 results: rows of a matrix, or the windows of an image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Args, Packed, Signature, Stream
from whet.tactics._fused import get_source_index
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu.conv._padded_image_ir import emit_padded_image_ir
from whet.tactics.cpu.onednn._kernel import to_f32

PANEL = 2 * LANES  # results
_ITEMS = 8  # per thread, if there are as many


@dataclass(frozen=True)
class Window:
    """A square window on an image of `height` x `width` with `rows` x `columns` results. `pads`: top, left."""

    side: int
    stride: int
    pads: tuple[int, int]
    samples: int
    height: int
    width: int
    rows: int
    columns: int

    @property
    def phases(self) -> int:
        """Copies of the image in each direction: the taps of each have the same offset from a multiple of the stride."""
        return min(self.side, self.stride)

    @property
    def line(self) -> int:
        """Columns of a copy."""
        return self.columns + (self.side - 1) // self.stride

    @property
    def lines(self) -> int:
        """Rows of a copy."""
        return self.rows + (self.side - 1) // self.stride

    @property
    def product_rows(self) -> int:
        """Pixels of a copy from the first result to the last one."""
        return (self.rows - 1) * self.line + self.columns

    def count_sample_bytes(self, channels: int) -> int:
        return self.phases**2 * self.lines * self.line * channels * 2

    def list_offsets(self, channels: int) -> list[int]:
        """For each tap the bytes from the first pixel of the first copy to the tap of the first result."""

        def locate(y: int, x: int) -> int:
            copy = y % self.stride * self.phases + x % self.stride
            return (copy * self.lines + y // self.stride) * self.line + x // self.stride

        return [locate(y, x) * channels * 2 for y in range(self.side) for x in range(self.side)]


class ProductKernel(CompiledKernel):
    """A planned product of `rows` rows of `inner` values, or of a `window`; the first packed operand holds weights and biases."""

    serial_work = 1 << 19  # multiplications
    name: ClassVar[str]
    """The function of the kernel's IR."""

    def __init__(
        self, layer: Layer, signature: Signature, chain: Chain, rows: int, weights: Tensor, bias: Tensor | None,
        to_matrix: Callable[[np.ndarray], np.ndarray], count: int, window: Window | None = None,
    ) -> None:  # fmt: skip
        self.channels = static_shape(layer.outputs[0].shape)[1 if signature.outputs[0].format == "nhwc" else -1]
        self.taps = window.side**2 if window else 1
        self.inner = prod(static_shape(weights.shape)) // self.channels // self.taps
        self.samples, self.rows, self.window = window.samples if window else 1, rows, window
        super().__init__(layer, signature, self.samples * rows * self.taps * self.inner * self.channels, count)
        self.x, self.residual = get_source_index(layer), chain.residual
        self.panels = -(-self.channels // PANEL)
        self.sizes: dict[str, int] = {}
        self.divide(chain)
        bias_at = self.panels * PANEL * self.taps * self.inner * 2
        nbytes = bias_at + self.panels * PANEL * 4
        self.sizes |= {"bias": bias_at, "channels": self.channels}
        if window:
            sample_bytes = window.count_sample_bytes(self.inner)
            self.scratch = self.samples * sample_bytes
            self.sizes |= {
                "taps": self.taps, "line": window.line, "columns": window.columns, "sample_bytes": sample_bytes,
                "sample_results": window.rows * window.columns, "sample_items": self.items // self.samples,
            }  # fmt: skip

        def pack() -> np.ndarray:
            out = np.zeros(nbytes, np.uint8)
            out[:bias_at] = self.pack_weights(to_matrix(to_f32(weights))).view(np.uint8).reshape(-1)
            if bias is not None:
                out[bias_at:].view(np.float32)[: self.channels] = to_f32(bias).reshape(-1)
            return out

        digests = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
        self.packed = (Packed(f"{digests}|{self.name} {to_matrix.__name__} {self.channels} {self.describe_packing()}", nbytes, pack, storable=True),)
        if window:
            offsets = np.array(window.list_offsets(self.inner), np.int64)
            self.packed += (Packed(f"offsets|{offsets.tobytes().hex()}", offsets.nbytes, lambda: offsets.view(np.uint8)),)

    @abstractmethod
    def divide(self, chain: Chain) -> None:
        """Divides the product into tiles, and those with panels into items (`divide_items`): sets `sizes` and the attributes of a subclass."""

    @abstractmethod
    def pack_weights(self, matrix: np.ndarray) -> np.ndarray:
        """[taps * inner, results] in panels, of a 16-bit type."""

    def describe_packing(self) -> str:
        """The parameters of `pack_weights` besides the matrix."""
        return ""

    @abstractmethod
    def generate(self) -> tuple[str | jit.Generated, tuple[str, ...]]:
        """The kernel's IR, and the names of its context's words before "share"."""

    def divide_items(self, tiles: int, item_tiles: int) -> tuple[int, int]:
        """Tiles and panels of an item: at most `item_tiles`, and fewer if there are not enough items for the threads. Sets `items`."""
        item_panels = self.panels
        wanted = _ITEMS * self.threads if self.threads > 1 else 1
        while self.samples * -(-tiles // item_tiles) * -(-self.panels // item_panels) < wanted and (item_tiles > 1 or item_panels > 1):
            # halving panels shares the weights, halving tiles the rows: the larger part is read once
            if item_panels > 1 and (item_tiles == 1 or self.taps * self.channels > self.rows):
                item_panels = -(-item_panels // 2)
            else:
                item_tiles = -(-item_tiles // 2)
        panel_items = -(-self.panels // item_panels)
        self.items = self.samples * -(-tiles // item_tiles) * panel_items
        self.threads = min(self.threads, self.items)
        self.sizes |= {"rows": self.rows, "panels": self.panels, "item_panels": item_panels, "panel_items": panel_items, "items": self.items}
        return item_tiles, item_panels

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), **self.sizes}
        if self.window:
            self._enqueue_copy(args, stream, self.window)
            operands["source"] = args.scratch
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        ir, names = self.generate()
        self.launch(stream, ir, self.name, args, [operands[name] for name in names], self.items)

    def _enqueue_copy(self, args: Args, stream: Stream, window: Window) -> None:
        """The launch that copies the image with its padding to scratch memory."""
        items = window.samples * window.phases**2 * window.lines
        sizes = [window.height, window.width, self.inner, window.lines, window.line, window.phases, window.stride, *window.pads, items]
        words: list[tuple[str, int] | int] = [("input", self.x), args.scratch, *sizes]
        self.launch(stream, jit.generate_lazily(emit_padded_image_ir, self.inner % PANEL), "pad", args, words, items)

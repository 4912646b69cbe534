"""Planned AMX products: how the product is divided into tiles, panels and items."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Args, Packed, Signature, Stream
from whet.tactics._fused import get_source_index
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.amx import TILE_BYTES, TILE_ROWS, make_config, why_no_tiles
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu._llvm.kernel import CompiledKernel
from whet.tactics.cpu.conv._amx_ir import PANEL, Form, emit_amx_ir, list_context_words, list_register_shapes
from whet.tactics.cpu.conv._bf16_tactic import RTOL, Bf16Tactic
from whet.tactics.cpu.conv._padded_image_ir import emit_padded_image_ir
from whet.tactics.cpu.onednn._kernel import to_f32

_STEP = TILE_BYTES // 2  # values of the inner dimension in a tile
_SECOND_CACHE = 3 << 18  # bytes of an item's rows that stay in L2
_ITEMS = 8  # per thread, if there are as many


def choose_step(inner: int) -> int:
    """The largest even divisor of the inner dimension that fits a tile; 0 if it is odd."""
    return next((n for n in range(_STEP, 0, -2) if inner % n == 0), 0)


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


class AmxKernel(CompiledKernel):
    """A planned product of `rows` rows of `inner` values, or of a `window`; the first packed operand holds weights and biases."""

    serial_work = 1 << 19  # multiplications
    rtol = RTOL

    def __init__(
        self, layer: Layer, signature: Signature, chain: Chain, rows: int, weights: Tensor, bias: Tensor | None,
        to_matrix: Callable[[np.ndarray], np.ndarray], count: int, window: Window | None = None,
    ) -> None:  # fmt: skip
        channels = static_shape(layer.outputs[0].shape)[1 if signature.outputs[0].format == "nhwc" else -1]
        taps = window.side**2 if window else 1
        inner = prod(static_shape(weights.shape)) // channels // taps
        samples = window.samples if window else 1
        super().__init__(layer, signature, samples * rows * taps * inner * channels, count)
        self.window, self.inner = window, inner
        self.x, self.residual = get_source_index(layer), chain.residual
        step = choose_step(inner)
        steps, panels, tile_bytes = inner // step, -(-channels // PANEL), step // 2 * TILE_BYTES
        pairs = -(-rows // (2 * TILE_ROWS))
        tile_rows = -(-rows // (2 * pairs))
        panel_bytes = 2 * taps * steps * tile_bytes
        last = channels - (panels - 1) * PANEL
        # an item's rows stay in L2 while it reads the weights of its panels
        item_pairs, item_panels = max(1, min(pairs, _SECOND_CACHE // (4 * tile_rows * inner))), panels
        wanted = _ITEMS * self.threads if self.threads > 1 else 1
        while samples * -(-pairs // item_pairs) * -(-panels // item_panels) < wanted and (item_pairs > 1 or item_panels > 1):
            # halving panels shares the weights, halving pairs the rows: the larger part is read once
            if item_panels > 1 and (item_pairs == 1 or taps * channels > rows):
                item_panels = -(-item_panels // 2)
            else:
                item_pairs = -(-item_pairs // 2)
        panel_items = -(-panels // item_panels)
        lines = 2 * tile_bytes // TILE_BYTES  # of a step's weights
        prefetched = -(-lines // item_pairs) if panels > 1 and item_pairs <= lines else 0
        self.form = Form(chain.steps, -(-last // LANES), (last - 1) % LANES + 1, prefetched, window is not None)
        sample_items = -(-pairs // item_pairs) * panel_items
        self.items = samples * sample_items
        self.threads = min(self.threads, self.items)
        bias_at = panels * panel_bytes
        self.sizes = {
            "rows": rows, "tile_rows": tile_rows, "pairs": pairs, "row_bytes": 2 * inner, "steps": steps, "step_bytes": 2 * step, "panels": panels,
            "panel_bytes": panel_bytes, "tile_bytes": tile_bytes, "bias": bias_at, "channels": channels, "pair_items": 0, "item_pairs": item_pairs,
            "item_panels": item_panels, "panel_items": panel_items, "items": self.items,
        }  # fmt: skip
        if window:
            sample_bytes = window.count_sample_bytes(inner)
            self.scratch = samples * sample_bytes
            self.sizes |= {
                "taps": taps, "line": window.line, "columns": window.columns, "sample_bytes": sample_bytes,
                "sample_results": window.rows * window.columns, "sample_items": sample_items,
            }  # fmt: skip
        self.config = make_config(list_register_shapes(tile_rows, step))
        nbytes = bias_at + panels * PANEL * 4

        def pack() -> np.ndarray:
            out = np.zeros(nbytes, np.uint8)
            out[:bias_at] = pack_panels(to_matrix(to_f32(weights)), step).view(np.uint8).reshape(-1)
            if bias is not None:
                out[bias_at:].view(np.float32)[:channels] = to_f32(bias).reshape(-1)
            return out

        digests = "|".join("" if t is None else t.constant().digest for t in (weights, bias))
        self.packed = (Packed(f"{digests}|amx {to_matrix.__name__} {channels} {step}", nbytes, pack, storable=True),)
        if window:
            offsets = np.array(window.list_offsets(inner), np.int64)
            self.packed += (Packed(f"offsets|{offsets.tobytes().hex()}", offsets.nbytes, lambda: offsets.view(np.uint8)),)
        self.implementation = f"{2 * tile_rows} rows x {PANEL} results, steps of {step}"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands: dict[str, tuple[str, int] | int] = {"source": ("input", self.x), "target": ("output", 0), **self.sizes}
        if self.window:
            self._enqueue_copy(args, stream, self.window)
            operands["source"] = args.scratch
        if self.residual is not None:
            operands["added"] = ("input", self.residual)
        operands |= {f"config{k}": word for k, word in enumerate(self.config)}
        words = [operands[name] for name in list_context_words(self.form) if name not in ("share", "packed", "offsets")]
        self.launch(stream, jit.generate_lazily(emit_amx_ir, self.form), "amx", args, words, self.items)

    def _enqueue_copy(self, args: Args, stream: Stream, window: Window) -> None:
        """The launch that copies the image with its padding to scratch memory."""
        items = window.samples * window.phases**2 * window.lines
        sizes = [window.height, window.width, self.inner, window.lines, window.line, window.phases, window.stride, *window.pads, items]
        words: list[tuple[str, int] | int] = [("input", self.x), args.scratch, *sizes]
        self.launch(stream, jit.generate_lazily(emit_padded_image_ir, self.inner % PANEL), "pad", args, words, items)


def pack_panels(matrix: np.ndarray, step: int) -> np.ndarray:
    """[inner, results] as panels of two tiles: [panel, step, tile, pair of rows, result, row of the pair], bf16; absent results are zeros."""
    inner, results = matrix.shape
    panels = -(-results // PANEL)
    full = np.zeros((inner, panels * PANEL), ml_dtypes.bfloat16)
    full[:, :results] = matrix
    parts = full.reshape(inner // step, step // 2, 2, panels, 2, LANES)
    return np.ascontiguousarray(parts.transpose(3, 0, 4, 1, 5, 2))


class AmxTactic(Bf16Tactic):
    """A product with constant weights."""

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_tiles()

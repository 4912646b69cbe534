"""Planned AMX products: how the product is divided into tiles, panels and items."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from whet.network import BF16
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.amx import TILE_BYTES, TILE_ROWS, make_config, why_no_tiles
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu._llvm.packing import RTOL
from whet.tactics.cpu.conv._amx_ir import PANEL, Form, emit_amx_ir, list_context_words, list_register_shapes
from whet.tactics.cpu.conv._product_kernel import ProductKernel
from whet.tactics.cpu.conv._product_tactic import ProductTactic

_STEP = TILE_BYTES // 2  # values of the inner dimension in a tile
_SECOND_CACHE = 3 << 18  # bytes of an item's rows that stay in L2


def choose_step(inner: int) -> int:
    """The largest even divisor of the inner dimension that fits a tile; 0 if it is odd."""
    return next((n for n in range(_STEP, 0, -2) if inner % n == 0), 0)


class AmxKernel(ProductKernel):
    """A planned product by tiles."""

    rtol = RTOL[BF16]
    name = "amx"

    def describe_packing(self) -> str:
        return str(choose_step(self.inner))

    def divide(self, chain: Chain) -> None:
        step = choose_step(self.inner)
        steps, tile_bytes = self.inner // step, step // 2 * TILE_BYTES
        pairs = -(-self.rows // (2 * TILE_ROWS))
        tile_rows = -(-self.rows // (2 * pairs))
        # an item's rows stay in L2 while it reads the weights of its panels
        item_pairs, _ = self.divide_items(pairs, max(1, min(pairs, _SECOND_CACHE // (4 * tile_rows * self.inner))))
        lines = 2 * tile_bytes // TILE_BYTES  # of a step's weights
        prefetched = -(-lines // item_pairs) if self.panels > 1 and item_pairs <= lines else 0
        last = self.channels - (self.panels - 1) * PANEL
        self.form = Form(chain.steps, -(-last // LANES), (last - 1) % LANES + 1, prefetched, self.window is not None)
        words = make_config(list_register_shapes(tile_rows, step))
        self.sizes |= {
            "tile_rows": tile_rows, "pairs": pairs, "row_bytes": 2 * self.inner, "steps": steps, "step_bytes": 2 * step,
            "panel_bytes": 2 * self.taps * steps * tile_bytes, "tile_bytes": tile_bytes, "pair_items": 0, "item_pairs": item_pairs,
        } | {f"config{k}": word for k, word in enumerate(words)}  # fmt: skip
        self.implementation = f"{2 * tile_rows} rows x {PANEL} results, steps of {step}"

    def pack_weights(self, matrix: np.ndarray) -> np.ndarray:
        return pack_panels(matrix, choose_step(self.inner))

    def generate(self) -> tuple[str | jit.Generated, tuple[str, ...]]:
        names = tuple(n for n in list_context_words(self.form) if n not in ("share", "packed", "offsets"))
        return jit.generate_lazily(emit_amx_ir, self.form), names


def pack_panels(matrix: np.ndarray, step: int) -> np.ndarray:
    """[inner, results] as panels of two tiles: [panel, step, tile, pair of rows, result, row of the pair], bf16; absent results are zeros."""
    inner, results = matrix.shape
    panels = -(-results // PANEL)
    full = np.zeros((inner, panels * PANEL), ml_dtypes.bfloat16)
    full[:, :results] = matrix
    parts = full.reshape(inner // step, step // 2, 2, panels, 2, LANES)
    return np.ascontiguousarray(parts.transpose(3, 0, 4, 1, 5, 2))


class AmxTactic(ProductTactic):
    """A product with constant weights."""

    kernel = AmxKernel
    least_rows = 4  # below, reading the weights takes longer than multiplying

    def unavailable(self) -> str | None:
        return super().unavailable() or why_no_tiles()

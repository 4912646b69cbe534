"""Planned products of f16: how the product is divided into tiles, panels, items and runs.

Sums of a run are rounded to f16 after each pair of products. Measured on products of normally distributed values, relative to the results, which are
rounded to f16 too (2.1e-4 of it): 4.1e-4 with runs of 8 pairs, 5.1e-4 with 16, 6.6e-4 with 32, for any length of rows. A run of 16 takes 1.2 times as
long as one of 32. A sum of a run beyond 65504 is not finite.
"""

from __future__ import annotations

import numpy as np

from whet.network import F16
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.epilogue import Chain
from whet.tactics.cpu._llvm.packing import RTOL
from whet.tactics.cpu.conv._half_ir import PANEL, Form, emit_half_ir, list_context_words
from whet.tactics.cpu.conv._product_kernel import ProductKernel
from whet.tactics.cpu.conv._product_tactic import ProductTactic

_TILE_ROWS = 14  # their accumulators, two vectors of weights and a pair of values take 31 registers
_RUN = 16  # pairs
_SECOND_CACHE = 3 << 18  # bytes of an item's rows that stay in L2


class HalfKernel(ProductKernel):
    """A planned product by FMAs of 32 halves."""

    rtol = RTOL[F16]
    name = "half"

    def divide(self, chain: Chain) -> None:
        tiles = -(-self.rows // _TILE_ROWS)
        tile_rows, pairs = -(-self.rows // tiles), self.inner // 2
        # an item's rows stay in L2 while it reads the weights of its panels
        item_tiles, _ = self.divide_items(tiles, max(1, min(tiles, _SECOND_CACHE // (2 * tile_rows * self.inner))))
        run = -(-pairs // -(-pairs // _RUN))
        last = (self.channels - 1) % PANEL + 1
        self.form = Form(chain.steps, tile_rows, pairs, run, last, self.window is not None)
        self.sizes |= {"tiles": tiles, "item_tiles": item_tiles, "panel_bytes": PANEL * self.taps * self.inner * 2}
        self.implementation = f"{tile_rows} rows x {PANEL} results, runs of {2 * run}"

    def pack_weights(self, matrix: np.ndarray) -> np.ndarray:
        return pack_pairs(matrix)

    def generate(self) -> tuple[str | jit.Generated, tuple[str, ...]]:
        names = tuple(n for n in list_context_words(self.form) if n not in ("share", "packed", "offsets"))
        return jit.generate_lazily(emit_half_ir, self.form), names


def pack_pairs(matrix: np.ndarray) -> np.ndarray:
    """[inner, results] as [panel, pair of rows, parity of the result, pair of results, row of the pair], f16; absent results are zeros."""
    inner, results = matrix.shape
    panels = -(-results // PANEL)
    full = np.zeros((inner, panels * PANEL), np.float16)
    with np.errstate(over="ignore"):
        full[:, :results] = matrix
    return np.ascontiguousarray(full.reshape(inner // 2, 2, panels, LANES, 2).transpose(2, 0, 4, 3, 1))


class HalfTactic(ProductTactic):
    """A product with constant weights on CPUs with AVX512-FP16."""

    stored, kernel = F16, HalfKernel
    sum_error = 1e-3  # see above: twice the measured mean

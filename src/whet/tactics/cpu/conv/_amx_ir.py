"""Products of bf16 rows and packed weights by AMX tiles, as LLVM IR: 32 rows by 32 results in four accumulator tiles, then the epilogue.

A convolution with a window is such a product for each tap, of an image with its padding (_padded_image_ir.py): rows of the product are all pixels
from the first result to the last one, and those in the padding between two image rows are not stored.

Four tiles are loaded for four products, which take twice as long as the loads. Accumulators go through 4 KB on the stack to vector registers, where
the bias is added, the epilogue computed and the result rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.amx import CONFIG_WORDS, TILE_BYTES, TILE_ROWS, add_bf16_product, configured_tiles, load_tile, store_tile, zero_tile
from whet.tactics.cpu._llvm.builder import FLOAT, INT8, INT16, INT64, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_fast_chain
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.packing import convert_to_bf16, widen_bf16
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

PANEL = 2 * LANES  # results of a panel: two tiles
_CONFIG = tuple(f"config{k}" for k in range(CONFIG_WORDS))
_SIZES = (
    "rows", "tile_rows", "pairs", "row_bytes", "steps", "step_bytes", "panels", "panel_bytes", "tile_bytes", "bias", "channels", "pair_items",
    "item_pairs", "item_panels", "panel_items", "items",
)  # fmt: skip
_WINDOW_SIZES = ("taps", "line", "columns", "sample_bytes", "sample_results", "sample_items")
"""Rows of the product; rows of a tile, pairs of tiles; bytes of a row; steps of the inner dimension, bytes of one; panels of results, bytes of a
panel's weights and of a tile of them; offset of the biases; results of a row; items: `item_pairs` pairs by `item_panels` panels."""
"""Of windows: taps; rows of the product from one image row to the next, of which the first `columns` are results; bytes of a sample's images, its
results, its items."""
_LINE = 2 * TILE_BYTES  # bytes of a row of two accumulator tiles
_ACCUMULATORS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)  # registers


@dataclass(frozen=True)
class Form:
    """The compile-time parameters: the epilogue, and the last panel's tiles with the results of the last one (at most 16).

    `prefetched`: cache lines of the next panel's weights that each step prefetches. `has_window`: a row is read once per tap, at the offsets (i64,
    bytes) that are the second packed operand.
    """

    steps: tuple[Step, ...]
    last_tiles: int
    last_lanes: int
    prefetched: int = 0
    has_window: bool = False


def list_register_shapes(tile_rows: int, step: int) -> list[tuple[int, int]]:
    """(rows, bytes per row) of the registers for tiles of `tile_rows` rows and `step` values of the inner dimension."""
    left, right, sums = (tile_rows, 2 * step), (step // 2, TILE_BYTES), (tile_rows, TILE_BYTES)
    return [sums] * 4 + [left] * 2 + [right] * 2


def list_context_words(form: Form) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    added = ("added",) if any(s.reads_residual for s in form.steps) else ()
    sizes, last = (_WINDOW_SIZES, ("offsets",)) if form.has_window else ((), ())
    return ("source", "target", *added, *_CONFIG, *sizes, *_SIZES, *LAST_WORDS, *last)


@cache
def emit_amx_ir(form: Form) -> str:
    """`amx(context)`. Weights are packed in panels: for each step two tiles of pairs of rows, 16 results each; biases are f32, whole panels.

    The last tiles overlap those before, so that each has the same rows.
    """
    module = Module()
    with parallel_kernel(module, "amx", list_context_words(form), "items") as (f, words):
        _Kernel(f, words, form).emit()
    return str(module)


class _Kernel:
    """The body of the function for a range of items."""

    def __init__(self, f: Function, words: SimpleNamespace, form: Form) -> None:
        self.f, self.w, self.form = f, words, form
        self.sums = f.allocate(INT8, 2 * TILE_ROWS * _LINE)
        self.activations = Activations(f, True, has_gelu=any(s.op == "Gelu" for s in form.steps))

    def emit(self) -> None:
        f, w, form = self.f, self.w, self.form
        config = w.context.at(list_context_words(form).index(_CONFIG[0])).as_integer().as_pointer(INT8)
        with configured_tiles(f, config), f.loop(w.begin, w.end) as items:
            index = items.index % w.sample_items if form.has_window else items.index
            self.sample = items.index // w.sample_items if form.has_window else f.value(0)
            pair_item, panel_item = index // w.panel_items, index % w.panel_items
            first_pair, first_panel = pair_item * w.item_pairs, panel_item * w.item_panels
            end_pair, end_panel = f.minimum(first_pair + w.item_pairs, w.pairs), f.minimum(first_panel + w.item_panels, w.panels)
            whole = (2, LANES)
            last = (form.last_tiles, form.last_lanes)
            with f.loop(first_panel, f.minimum(end_panel, w.panels - (last != whole))) as panels:
                self._emit_panel(panels.index, first_pair, end_pair, *whole)
            if last != whole:
                with f.loop(f.maximum(first_panel, w.panels - 1), end_panel) as panels:
                    self._emit_panel(panels.index, first_pair, end_pair, *last)

    def _emit_panel(self, panel: Value, first_pair: Value, end_pair: Value, tiles: int, last_lanes: int) -> None:
        """Results of a panel of so many tiles for a range of pairs of row tiles."""
        f, w, form = self.f, self.w, self.form
        weights = w.packed.as_pointer(INT8).at(panel * w.panel_bytes)
        bias = w.packed.as_pointer(INT8).at(w.bias).as_integer().as_pointer(FLOAT).at(panel * PANEL)
        biases = [bias.load_vector(j * LANES) for j in range(tiles)]
        with f.loop(first_pair, end_pair) as pairs:
            last_start = w.rows - w.tile_rows
            starts = [f.minimum((pairs.index * 2 + half) * w.tile_rows, last_start) for half in range(2)]
            following = weights.at(w.panel_bytes).at((pairs.index - first_pair) * w.steps * (form.prefetched * TILE_BYTES))
            self._emit_product(weights, starts, tiles, following)
            self._emit_results(panel, starts, biases, last_lanes)

    def _emit_product(self, weights: Pointer, starts: Sequence[Value], tiles: int, following: Pointer) -> None:
        """Stores the accumulators of two row tiles by `tiles` weight tiles on the stack. `following`: weights to prefetch."""
        f, w = self.f, self.w
        source = w.source.as_pointer(INT8)
        if self.form.has_window:
            source = source.at(self.sample * w.sample_bytes)
        left = [source.at(start * w.row_bytes) for start in starts]
        for half in range(2):
            for j in range(tiles):
                zero_tile(f, _ACCUMULATORS[half][j])
        if self.form.has_window:
            tap_steps, offsets = w.steps * w.tile_bytes * 2, w.offsets.as_pointer(INT64)
            with f.loop(0, w.taps) as taps:
                at = [x.at(offsets.load(taps.index)) for x in left]
                lines = following.at(taps.index * w.steps * (self.form.prefetched * TILE_BYTES))
                self._add_steps(at, weights.at(taps.index * tap_steps), lines, tiles)
        else:
            self._add_steps(left, weights, following, tiles)
        for half in range(2):
            for j in range(tiles):
                store_tile(f, _ACCUMULATORS[half][j], self.sums.at(half * TILE_ROWS * _LINE + j * TILE_BYTES), _LINE)

    def _add_steps(self, left: Sequence[Pointer], weights: Pointer, following: Pointer, tiles: int) -> None:
        """Adds the products of all steps, of a tap if there are several."""
        f, w = self.f, self.w
        with f.loop(0, w.steps) as steps:
            offset, right = steps.index * w.step_bytes, weights.at(steps.index * w.tile_bytes * 2)
            lines = following.at(steps.index * (self.form.prefetched * TILE_BYTES))
            for line in range(self.form.prefetched):
                lines.prefetch(line * TILE_BYTES, to_second_cache=True)
            for j in range(tiles):
                load_tile(f, _RIGHT[j], right.at(w.tile_bytes * j) if j else right, TILE_BYTES)
            for half in range(2):
                load_tile(f, _LEFT[half], left[half].at(offset), w.row_bytes)
                for j in range(tiles):
                    add_bf16_product(f, _ACCUMULATORS[half][j], _LEFT[half], _RIGHT[j])

    def _emit_results(self, panel: Value, starts: Sequence[Value], biases: Sequence[Value], last_lanes: int) -> None:
        f, w = self.f, self.w
        sums = self.sums.as_integer().as_pointer(FLOAT)

        def emit_row(row: Value, half: int, result: Value) -> None:
            offset = result * w.channels + panel * PANEL
            line = sums.at(row * PANEL + half * TILE_ROWS * PANEL)
            for j, bias in enumerate(biases):
                mask = None if j < len(biases) - 1 or last_lanes == LANES else [lane < last_lanes for lane in range(LANES)]
                self._emit_result(line.load_vector(j * LANES) + bias, offset + j * LANES, mask)

        if not self.form.has_window:
            with f.loop(0, w.tile_rows, at_least_once=True) as rows:
                for half, start in enumerate(starts):
                    emit_row(rows.index, half, start + rows.index)
            return
        for half, start in enumerate(starts):
            column, before = start % w.line, start // w.line * w.columns + self.sample * w.sample_results
            with f.loop(0, w.tile_rows, carried=[column, before + f.minimum(column, w.columns)], at_least_once=True) as rows:
                column, result = rows.values
                is_result = column < w.columns
                with f.when(is_result):
                    emit_row(rows.index, half, result)
                following = column + 1
                rows.carry(f.select(following.equals(w.line), f.value(0), following), result + is_result.convert("zext", INT64))

    def _emit_result(self, x: Value, offset: Value, mask: Sequence[bool] | None) -> None:
        """Stores 16 results, or those of `mask`, at `offset`."""
        f, residual = self.f, None
        if any(s.reads_residual for s in self.form.steps):
            added = self.w.added.as_pointer(INT16).at(offset)
            loaded = added.load_vector() if mask is None else added.load_masked(mask, f.vector([0] * LANES, INT16))
            residual = widen_bf16(loaded)
        result = convert_to_bf16(f, emit_fast_chain(f, self.activations, self.form.steps, x, residual))
        target = self.w.target.as_pointer(INT16).at(offset)
        if mask is None:
            target.store(result)
        else:
            target.store_masked(result, mask)

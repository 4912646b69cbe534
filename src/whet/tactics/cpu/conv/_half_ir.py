"""Products of f16 rows and packed weights by FMAs of 32 halves (AVX512-FP16), as LLVM IR: a tile of rows by 32 results, then the epilogue.

Two consecutive values of a row are broadcast together, and multiplied by two consecutive rows of weights, interleaved: an accumulator has for each of
16 results a sum over even and one over odd values. After `run` pairs both are added, and the sums of the 32 results, rounded to f16, are added to
f32 accumulators in memory: a rounding error of f16 is relative to the sum of a run, not of a row.

A convolution with a window is such a product for each tap, of an image with its padding (_padded_image_ir.py): rows of the product are all pixels
from the first result to the last one, and those in the padding between two image rows are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, HALF, INT8, INT16, INT32, INT64, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.epilogue import Step, emit_fast_chain
from whet.tactics.cpu._llvm.kernel import LAST_WORDS
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

PANEL = 2 * LANES  # results of a panel: two vectors of pairs
_PAIRS = Type("i32", LANES)
_HALVES = Type("half", PANEL)
_PAIR_BYTES = 4
_WEIGHTS = 2 * 2 * PANEL  # bytes of a panel's weights for a pair
_SIZES = ("rows", "tiles", "panels", "panel_bytes", "bias", "channels", "item_tiles", "item_panels", "panel_items", "items")
_WINDOW_SIZES = ("taps", "line", "columns", "sample_bytes", "sample_results", "sample_items")
"""Rows of the product, tiles of them; panels of results, bytes of a panel's weights; offset of the biases; results of a row; items: `item_tiles`
tiles by `item_panels` panels."""
"""Of windows: as in _amx_ir.py."""


@dataclass(frozen=True)
class Form:
    """The compile-time parameters: the epilogue, rows of a tile, pairs of values of a row (of a tap), pairs of a run, results of the last panel.

    `has_window`: a row is read once per tap, at the offsets (i64, bytes) that are the second packed operand.
    """

    steps: tuple[Step, ...]
    tile_rows: int
    pairs: int
    run: int
    last_results: int
    has_window: bool = False

    @property
    def row_bytes(self) -> int:
        return _PAIR_BYTES * self.pairs


def list_context_words(form: Form) -> tuple[str, ...]:
    """Names of the context's words, in order."""
    added = ("added",) if any(s.reads_residual for s in form.steps) else ()
    sizes, last = (_WINDOW_SIZES, ("offsets",)) if form.has_window else ((), ())
    return ("source", "target", *added, *sizes, *_SIZES, *LAST_WORDS, *last)


@cache
def emit_half_ir(form: Form) -> str:
    """`half(context)`. Weights are packed in panels: for each pair two vectors of 16 results; biases are f32, whole panels.

    The last tile of rows overlaps the one before.
    """
    module = Module()
    with parallel_kernel(module, "half", list_context_words(form), "items") as (f, words):
        _Kernel(f, words, form).emit()
    return str(module)


class _Kernel:
    """The body of the function for a range of items."""

    def __init__(self, f: Function, words: SimpleNamespace, form: Form) -> None:
        self.f, self.w, self.form = f, words, form
        self.sums = f.allocate(FLOAT, form.tile_rows * PANEL)
        self.runs = f.allocate(HALF, form.tile_rows * PANEL)
        self.activations = Activations(f, True, has_gelu=any(s.op == "Gelu" for s in form.steps))

    def emit(self) -> None:
        f, w, form = self.f, self.w, self.form
        with f.loop(w.begin, w.end) as items:
            index = items.index % w.sample_items if form.has_window else items.index
            self.sample = items.index // w.sample_items if form.has_window else f.value(0)
            first_tile, first_panel = index // w.panel_items * w.item_tiles, index % w.panel_items * w.item_panels
            end_tile, end_panel = f.minimum(first_tile + w.item_tiles, w.tiles), f.minimum(first_panel + w.item_panels, w.panels)
            is_whole = form.last_results == PANEL
            with f.loop(first_panel, f.minimum(end_panel, w.panels - (0 if is_whole else 1))) as panels:
                self._emit_panel(panels.index, first_tile, end_tile, PANEL)
            if not is_whole:
                with f.loop(f.maximum(first_panel, w.panels - 1), end_panel) as panels:
                    self._emit_panel(panels.index, first_tile, end_tile, form.last_results)

    def _emit_panel(self, panel: Value, first_tile: Value, end_tile: Value, results: int) -> None:
        """The `results` of a panel for a range of tiles."""
        f, w, form = self.f, self.w, self.form
        packed = w.packed.as_pointer(INT8)
        weights = packed.at(panel * w.panel_bytes)
        bias = packed.at(w.bias).as_integer().as_pointer(FLOAT).at(panel * PANEL)
        with f.loop(first_tile, end_tile) as tiles:
            start = f.minimum(tiles.index * form.tile_rows, w.rows - form.tile_rows)
            for half in range(2):
                column = bias.load_vector(half * LANES)
                for r in range(form.tile_rows):
                    self.sums.store(column, r * PANEL + half * LANES)
            self._emit_product(weights, start)
            self._emit_results(panel, start, results)

    def _emit_product(self, weights: Pointer, start: Value) -> None:
        """Adds the products of a tile's rows and a panel's weights to the sums."""
        f, w, form = self.f, self.w, self.form
        rows = w.source.as_pointer(INT8)
        if form.has_window:
            rows = rows.at(self.sample * w.sample_bytes)
        rows = rows.at(start * form.row_bytes)
        if not form.has_window:
            self._add_tap(rows, weights)
            return
        offsets = w.offsets.as_pointer(INT64)
        with f.loop(0, w.taps) as taps:
            self._add_tap(rows.at(offsets.load(taps.index)), weights.at(taps.index * (form.pairs * _WEIGHTS)))

    def _add_tap(self, rows: Pointer, weights: Pointer) -> None:
        f, form = self.f, self.form
        whole, rest = divmod(form.pairs, form.run)
        with f.loop(0, whole) as runs:
            k = f.opaque(runs.index)
            self._add_run(rows.at(k * (form.run * _PAIR_BYTES)), weights.at(k * (form.run * _WEIGHTS)), form.run)
        if rest:
            self._add_run(rows.at(whole * form.run * _PAIR_BYTES), weights.at(whole * form.run * _WEIGHTS), rest)

    def _add_run(self, rows: Pointer, weights: Pointer, pairs: int) -> None:
        f, form = self.f, self.form
        rows, weights = f.opaque_pointer(rows), f.opaque_pointer(weights)
        words = rows.as_integer().as_pointer(INT32)
        halves = weights.as_integer().as_pointer(HALF)
        accumulators: list[list[Value]] = []
        for k in range(pairs):
            columns = [halves.load((2 * k + half) * PANEL, PANEL) for half in range(2)]
            for r in range(form.tile_rows):
                pair = words.load(r * form.pairs + k).broadcast(LANES)
                values = f.emit(_HALVES, f"bitcast {pair} to {_HALVES}", pair)
                if k == 0:
                    accumulators.append([values * c for c in columns])
                else:
                    accumulators[r] = [f.fma(values, c, total) for c, total in zip(columns, accumulators[r], strict=True)]
                f.scheduling_barrier()
        for r, (even, odd) in enumerate(accumulators):
            self.runs.store(self._add_pairs(even, odd), r * PANEL)
        f.scheduling_barrier()  # loads convert without a shuffle, unlike registers
        for r in range(form.tile_rows):
            for half in range(2):
                at = r * PANEL + half * LANES
                part = self.runs.load(at, LANES).convert("fpext", FLOAT)
                self.sums.store(self.sums.load_vector(at) + part, at)

    def _add_pairs(self, even: Value, odd: Value) -> Value:
        """The sums of the pairs of results with even indices and of those with odd ones, as one vector in order."""
        f = self.f
        words = [f.emit(_PAIRS, f"bitcast {x} to {_PAIRS}", x) for x in (odd, even)]
        sixteen = f.value(16, _PAIRS)
        crossed = f.call_external(f"llvm.fshl.v{LANES}i32", _PAIRS, *words, sixteen)  # the high half of an even result, the low one of an odd result
        kept = f.select(f.mask([True, False] * LANES), even, odd)
        return kept + f.emit(_HALVES, f"bitcast {crossed} to {_HALVES}", crossed)

    def _emit_results(self, panel: Value, start: Value, results: int) -> None:
        f, w, form = self.f, self.w, self.form

        def emit_row(row: Value, result: Value) -> None:
            offset = result * w.channels + panel * PANEL
            for half in range(-(-results // LANES)):
                count = min(LANES, results - half * LANES)
                self._emit_result(self.sums.at(row * PANEL).load_vector(half * LANES), offset + half * LANES, count)

        if not form.has_window:
            with f.loop(0, form.tile_rows, at_least_once=True) as rows:
                emit_row(rows.index, start + rows.index)
            return
        column = start % w.line
        before = start // w.line * w.columns + self.sample * w.sample_results
        with f.loop(0, form.tile_rows, carried=[column, before + f.minimum(column, w.columns)], at_least_once=True) as rows:
            column, result = rows.values
            is_result = column < w.columns
            with f.when(is_result):
                emit_row(rows.index, result)
            following = column + 1
            rows.carry(f.select(following.equals(w.line), f.value(0), following), result + is_result.convert("zext", INT64))

    def _emit_result(self, x: Value, offset: Value, count: int) -> None:
        """Stores `count` results, at most 16, at `offset`."""
        f, residual = self.f, None
        mask = None if count == LANES else [lane < count for lane in range(LANES)]
        if any(s.reads_residual for s in self.form.steps):
            added = self.w.added.as_pointer(INT16).at(offset)
            loaded = added.load_vector() if mask is None else added.load_masked(mask, f.vector([0] * LANES, INT16))
            residual = loaded.convert("bitcast", HALF).convert("fpext", FLOAT)
        result = emit_fast_chain(f, self.activations, self.form.steps, x, residual).convert("fptrunc", HALF).convert("bitcast", INT16)
        target = self.w.target.as_pointer(INT16).at(offset)
        if mask is None:
            target.store(result)
        else:
            target.store_masked(result, mask)

"""GridSample in f32, any mode and number of axes. For coverage: otherwise NumPy computes it."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT32, LANES, Function, Module, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._lines_ir import iota, spread
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, list_context_words

_BLOCK = 64  # positions of an item
_LARGEST = 1 << 31  # elements of an image: their indices have 32 bits


@tactic
class GridSample(LoopTactic):
    ops = ("GridSample",)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return (0, 1)

    def refuses_types(self, layer: Layer) -> str | None:
        return None if layer.needs(0).dtype.name == "f32" else "computes in f32"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        shape, a = static_shape(layer.needs(0).shape), layer.attrs
        batch, channels, *sizes = shape
        positions = prod(static_shape(layer.outputs[0].shape)[2:])
        if prod(sizes) >= _LARGEST or positions * len(sizes) >= _LARGEST:
            return f"an image has {_LARGEST} elements or more"
        blocks = -(-positions // _BLOCK)
        ir = emit_grid_sample_ir(len(sizes), a["mode"], a["padding_mode"], bool(a["align_corners"]))
        numbers = (channels, positions, blocks, *sizes)
        taps = {"nearest": 1, "linear": 2, "cubic": 4}[a["mode"]] ** len(sizes)
        places, work = (("input", 0), ("input", 1), ("output", 0)), batch * positions * channels * taps
        launch = Launch("grid_sample", ir, places, batch * blocks, numbers, work=work)
        return Loops((launch,), rtol=1e-5)


@cache
def emit_grid_sample_ir(axes: int, mode: str, padding: str, aligned: bool) -> str:
    """`grid_sample(context)`: one item per block of positions of a batch item; in vectors of positions, for which the indices and weights of
    all taps are computed once for all channels. Numbers: channels, positions, blocks, and the sizes of the axes of an image."""
    words = list_context_words(("source", "grid", "target"), ("channels", "positions", "blocks", *(f"size{k}" for k in range(axes))))
    module = Module()
    with parallel_kernel(module, "grid_sample", words, "items") as (f, w), f.loop(w.begin, w.end) as items:
        source, grid, target = (x.as_pointer(FLOAT) for x in (w.source, w.grid, w.target))
        sizes = [getattr(w, f"size{k}") for k in range(axes)]
        item, block = items.index // w.blocks, items.index % w.blocks
        begin = block * _BLOCK
        end = f.minimum(begin + _BLOCK, w.positions)
        plane = sizes[0]
        for size in sizes[1:]:
            plane = plane * size
        first = item * w.channels

        def emit(position: Value, lanes: int) -> None:
            own = grid.at((item * w.positions + position) * axes)
            taps = []
            for k, size in enumerate(sizes):
                g = own.at(axes - 1 - k).gather(iota(f, INT32, lanes) * axes) if lanes > 1 else own.load(axes - 1 - k)
                taps.append(_Axis(f, size, lanes, padding, aligned).list_taps(g, mode))
            chosen = [_join_taps(f, tap, sizes, lanes) for tap in product(*taps)]
            with f.loop(0, w.channels) as channels:
                x = source.at((first + channels.index) * plane)
                total: Value | None = None
                for index, weight in chosen:
                    picked = x.gather(index) * weight
                    total = picked if total is None else total + picked
                assert total is not None
                target.store(total, (first + channels.index) * w.positions + position)

        with f.loop(begin, end - (LANES - 1), step=LANES) as many:
            emit(many.index, LANES)
        with f.loop(many.index, end) as one:
            emit(one.index, 1)
    return str(module)


def _join_taps(f: Function, taps: tuple[tuple[Value, Value], ...], sizes: list[Value], lanes: int) -> tuple[Value, Value]:
    """(index in an image, weight) of one tap of every axis."""
    index, weight = taps[0]
    for (own, factor), size in zip(taps[1:], sizes[1:], strict=True):
        index = index * spread(size.convert("trunc", INT32), lanes) + own
        weight = weight * factor
    return (index if lanes > 1 else index.convert("sext", Type("i64"))), weight


class _Axis:
    """Coordinates along an axis of an image."""

    def __init__(self, f: Function, size: Value, lanes: int, padding: str, aligned: bool) -> None:
        self._f, self._lanes, self._padding, self._aligned = f, lanes, padding, aligned
        self._size = spread(size.convert("sitofp", FLOAT), lanes)
        self._last = self._size - 1.0

    def list_taps(self, g: Value, mode: str) -> list[tuple[Value, Value]]:
        """(index as i32, weight) of each tap; g is a coordinate from -1 to 1. The weight of a tap outside is 0 if the padding is zeros."""
        f = self._f
        at = (g + 1.0) * 0.5 * self._last if self._aligned else ((g + 1.0) * self._size - 1.0) * 0.5
        if self._padding != "zeros" and mode != "cubic":
            at = self._map_inside(at)
        if mode == "nearest":
            return [self._make_tap(f.math("rint", at), f.value(1.0, at.type))]
        first = f.math("floor", at)
        t = at - first
        if mode == "linear":
            return [self._make_tap(first, f.value(1.0, t.type) - t), self._make_tap(first + 1.0, t)]
        weights = _compute_cubic_weights(f, t)
        return [self._make_tap(first + float(k - 1), weight) for k, weight in enumerate(weights)]

    def _make_tap(self, place: Value, weight: Value) -> tuple[Value, Value]:
        f, zero = self._f, self._f.value(0.0, place.type)
        if self._padding == "zeros":
            weight = f.select((place >= zero) & (self._last >= place), weight, zero)
        else:
            place = self._map_inside(place)
        return f.minimum(f.maximum(place, zero), self._last).convert("fptosi", INT32), weight

    def _map_inside(self, at: Value) -> Value:
        """A coordinate mapped into the axis by border or reflection padding."""
        f, zero = self._f, self._f.value(0.0, at.type)
        if self._padding == "border":
            return self._clip(at)
        low, high = (zero, self._last) if self._aligned else (zero - 0.5, self._size - 0.5)
        span = high - low
        period = span + span
        at = f.math("fabs", at - low)
        at = at - f.math("floor", at / period) * period
        at = f.select(at > span, period - at, at) + low
        return f.select(span > 0.0, self._clip(at), zero)

    def _clip(self, at: Value) -> Value:
        """NaN stays."""
        f, zero = self._f, self._f.value(0.0, at.type)
        return f.select(at < zero, zero, f.select(at > self._last, self._last, at))


def _compute_cubic_weights(f: Function, t: Value) -> list[Value]:
    """Of the four neighbours of a coordinate, t above the second one; the coefficient is -0.75."""
    c = -0.75
    one = f.value(1.0, t.type)
    far = [((d * c - 5 * c) * d + 8 * c) * d - 4 * c for d in (t + 1.0, one + one - t)]
    near = [(d * (c + 2) - (c + 3)) * d * d + 1.0 for d in (t, one - t)]
    return [far[0], near[0], near[1], far[1]]

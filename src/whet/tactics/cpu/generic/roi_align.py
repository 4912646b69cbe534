"""RoiAlign in f32. For coverage: otherwise NumPy computes it."""

from __future__ import annotations

from functools import cache

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import DOUBLE, FLOAT, INT32, INT64, LANES, Function, Module, Type, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.generic._lines_ir import iota, spread
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, list_context_words

_LARGEST = 1 << 31  # elements of a channel: their indices have 32 bits
_ASSUMED_SAMPLES = 2  # of a bin and axis, for the work, if they depend on the box
_MOST_SAMPLES = 1 << 14  # of a bin and axis, if they depend on the box


@tactic
class RoiAlign(LoopTactic):
    ops = ("RoiAlign",)

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return (0, 1, 2)

    def refuses_types(self, layer: Layer) -> str | None:
        if layer.needs(0).dtype.name != "f32" or layer.needs(1).dtype.name != "f32":
            return "computes in f32"
        return None if layer.needs(2).dtype.name in ("i32", "i64") else "takes the indices of images as i32 or i64"

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        (batch, channels, height, width), a = static_shape(layer.needs(0).shape), layer.attrs
        boxes, bins = static_shape(layer.needs(1).shape)[0], a["output_height"] * a["output_width"]
        if height * width >= _LARGEST or bins >= _LARGEST:
            return f"a channel has {_LARGEST} elements or more"
        ir = emit_roi_align_ir(
            a["mode"], a["coordinate_transformation_mode"] == "half_pixel", a["sampling_ratio"], float(a["spatial_scale"]),
            layer.needs(2).dtype.name == "i64",
        )  # fmt: skip
        numbers = (batch, channels, height, width, a["output_height"], a["output_width"])
        work = boxes * channels * bins * 4 * (a["sampling_ratio"] or _ASSUMED_SAMPLES) ** 2
        places = (("input", 0), ("input", 1), ("input", 2), ("output", 0), ("fault", 0))
        failure = f"RoiAlign '{layer.name}': a box has more than {_MOST_SAMPLES} samples per bin. Check the values of %{layer.needs(1).name}."
        return Loops((Launch("roi_align", ir, places, boxes, numbers, work=work),), failure=failure, rtol=1e-5)


@cache
def emit_roi_align_ir(mode: str, half: bool, ratio: int, scale: float, wide: bool) -> str:
    """`roi_align(context)`: one item per box, in vectors of bins. The samples of a bin are added to its result (or compared with it) one after the
    other, for all channels: the indices and weights of a sample's four corners are computed once. `wide`: the images are i64, else i32.

    Coordinates are f64, as in the reference: the weights are small differences of them.
    """
    words = list_context_words(("source", "boxes", "images", "target", "fault"), ("batch", "channels", "height", "width", "rows", "columns"))
    module = Module()
    with parallel_kernel(module, "roi_align", words, "items") as (f, w), f.loop(w.begin, w.end) as items:
        box = w.boxes.as_pointer(FLOAT).at(items.index * 4)
        x1, y1, x2, y2 = (box.load(k).convert("fpext", DOUBLE) * scale - (0.5 if half else 0.0) for k in range(4))
        vertical = _Axis(f, y1, y2, w.rows, w.height, half, ratio)
        horizontal = _Axis(f, x1, x2, w.columns, w.width, half, ratio)
        image = w.images.as_pointer(INT64 if wide else INT32).load(items.index)
        image = image if wide else image.convert("sext", INT64)
        image = f.minimum(f.maximum(image, 0), w.batch - 1)
        plane, bins = w.height * w.width, w.rows * w.columns
        source = w.source.as_pointer(FLOAT).at(image * w.channels * plane)
        target = w.target.as_pointer(FLOAT).at(items.index * w.channels * bins)
        samples = vertical.count * horizontal.count
        if not ratio:
            with f.when(f.maximum(vertical.count, horizontal.count) > _MOST_SAMPLES):
                w.fault.as_pointer(INT64).store(f.value(1))

        def emit(first: Value, lanes: int) -> None:
            bin_ = spread(first.convert("trunc", INT32), lanes) + iota(f, INT32, lanes)
            across = spread(w.columns.convert("trunc", INT32), lanes)
            row, column = bin_ // across, bin_ % across
            with f.loop(0, w.channels) as channels:
                target.store(f.value(0.0, Type("float", lanes)), channels.index * bins + first)
            with f.loop(0, vertical.count) as outer, f.loop(0, horizontal.count) as inner:
                corners, inside = _list_corners(f, vertical.sample(row, outer.index), horizontal.sample(column, inner.index), w.width)
                is_first = spread(outer.index.equals(0) & inner.index.equals(0), lanes)
                with f.loop(0, w.channels) as channels:
                    x, at = source.at(channels.index * plane), target.at(channels.index * bins + first)
                    zero = f.value(0.0, Type("float", lanes))
                    parts = [f.select(inside, x.gather(index) * weight, zero) for index, weight in corners]
                    at.store(_combine(f, mode, at.load(0, lanes), parts, is_first))
            if mode == "avg":
                with f.when(samples > 1), f.loop(0, w.channels) as channels:
                    at = target.at(channels.index * bins + first)
                    at.store(at.load(0, lanes) / spread(samples.convert("sitofp", FLOAT), lanes))

        with f.loop(0, bins - (LANES - 1), step=LANES) as many:
            emit(many.index, LANES)
        with f.loop(many.index, bins) as one:
            emit(one.index, 1)
    return str(module)


def _list_corners(f: Function, vertical: tuple[Value, ...], horizontal: tuple[Value, ...], width: Value) -> tuple[list[tuple[Value, Value]], Value]:
    """(index in a channel, weight) of the four corners of samples, and whether these are inside of the image."""
    (top, bottom, y, inside_y), (left, right, x, inside_x) = vertical, horizontal
    across, one = spread(width.convert("trunc", INT32), top.lanes), f.value(1.0, y.type)
    corners = []
    for line, wy in ((top, one - y), (bottom, y)):
        for place, wx in ((left, one - x), (right, x)):
            index = line * across + place
            corners.append((index if index.lanes > 1 else index.convert("sext", INT64), (wy * wx).convert("fptrunc", FLOAT)))
    return corners, inside_y & inside_x


def _combine(f: Function, mode: str, total: Value, parts: list[Value], is_first: Value) -> Value:
    """The result so far with one more sample: the sum, or the maximum of the weighted corners, which NaN is."""
    if mode == "avg":
        return total + ((parts[0] + parts[1]) + (parts[2] + parts[3]))
    best = f.select(is_first, parts[0], total)
    for part in parts:
        best = f.select((part > best) | part.is_nan(), part, best)
    return best


class _Axis:
    """Samples along an axis of a box: `count` in each bin."""

    def __init__(self, f: Function, low: Value, high: Value, bins: Value, size: Value, half: bool, ratio: int) -> None:
        self._f = f
        length = high - low if half else f.maximum(high - low, 1.0)
        self._start, self._bin, self._size = low, length / bins.convert("sitofp", DOUBLE), size
        if ratio:
            self.count = f.value(ratio)
        else:
            self.count = f.minimum(f.maximum(f.math("ceil", self._bin), 0.0), float(_MOST_SAMPLES + 1)).convert("fptosi", INT64)

    def sample(self, bin_: Value, index: Value) -> tuple[Value, Value, Value, Value]:
        """(lower index, higher index, weight of the higher one in f64, whether the sample is inside) of a sample of each bin."""
        f, lanes = self._f, bin_.lanes
        part = (index.convert("sitofp", DOUBLE) + 0.5) / self.count.convert("sitofp", DOUBLE)
        at = spread(self._start, lanes) + (bin_.convert("sitofp", DOUBLE) + spread(part, lanes)) * spread(self._bin, lanes)
        size = spread(self._size.convert("sitofp", DOUBLE), lanes)
        inside = (at >= -1.0) & (size >= at)
        zero = f.value(0.0, at.type)
        at = f.select(inside, f.maximum(at, zero), zero)
        low = f.minimum(f.math("floor", at), size - 1.0)
        high = f.minimum(low + 1.0, size - 1.0)
        weight = f.select(low >= size - 1.0, zero, at - low)
        return low.convert("fptosi", INT32), high.convert("fptosi", INT32), weight, inside

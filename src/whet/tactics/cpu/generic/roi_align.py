"""RoiAlign in f32. For coverage: otherwise NumPy computes it."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cpu._llvm.builder import DOUBLE, FLOAT, INT32, INT64, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, list_context_words
from whet.tactics.cpu.generic._pixels_ir import describe_pixels, round_up, store_transposed

_LARGEST = 1 << 31  # elements of a channel
_MOST_THREADS = 64  # with memory of their own
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
        pixel, step = round_up(channels), -(-boxes // _MOST_THREADS)
        image, nbytes = 4 * batch * height * width * pixel, 4 * LANES * pixel
        ir = emit_roi_align_ir(
            a["mode"], a["coordinate_transformation_mode"] == "half_pixel", a["sampling_ratio"], float(a["spatial_scale"]),
            layer.needs(2).dtype.name == "i64",
        )  # fmt: skip
        numbers = (batch, channels, height, width, a["output_height"], a["output_width"], pixel, nbytes)
        work = boxes * channels * bins * 4 * (a["sampling_ratio"] or _ASSUMED_SAMPLES) ** 2
        places = (("scratch", 0), ("input", 1), ("input", 2), ("output", 0), ("scratch", image), ("fault", 0))
        failure = f"RoiAlign '{layer.name}': a box has more than {_MOST_SAMPLES} samples per bin. Check the values of %{layer.needs(1).name}."
        pixels = describe_pixels(batch, channels, height * width, pixel, ("scratch", 0))
        launch = Launch("roi_align", ir, places, boxes, numbers, step, work=work)
        return Loops((pixels, launch), (), image + min(boxes, _MOST_THREADS) * nbytes, failure, 1e-5)


@cache
def emit_roi_align_ir(mode: str, half: bool, ratio: int, scale: float, wide: bool) -> str:
    """`roi_align(context)`: one item per box. Of each thread, `tile` has the results of LANES bins for all channels, `stride` bytes; samples are
    added to them (or compared with them), then they are transposed. `wide`: the images are i64, else i32.

    Numbers: the images' number and size, bins of a box, floats of a pixel. Coordinates are f64, as in the reference: the weights are small
    differences of them.
    """
    places = ("pixels", "boxes", "images", "target", "tile", "fault")
    words = list_context_words(places, ("batch", "channels", "height", "width", "rows", "columns", "pixel", "stride"))
    module = Module()
    with parallel_kernel(module, "roi_align", words, "items") as (f, w):
        rest = f.allocate(FLOAT, LANES)
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        tile, zero = (w.tile + me * w.stride).as_pointer(FLOAT), f.value(0.0, Type("float", LANES))
        with f.loop(w.begin, w.end) as items:
            box = w.boxes.as_pointer(FLOAT).at(items.index * 4)
            x1, y1, x2, y2 = (box.load(k).convert("fpext", DOUBLE) * scale - (0.5 if half else 0.0) for k in range(4))
            vertical = _Axis(f, y1, y2, w.rows, w.height, half, ratio)
            horizontal = _Axis(f, x1, x2, w.columns, w.width, half, ratio)
            image = w.images.as_pointer(INT64 if wide else INT32).load(items.index)
            image = image if wide else image.convert("sext", INT64)
            image = f.minimum(f.maximum(image, 0), w.batch - 1)
            bins = w.rows * w.columns
            source = w.pixels.as_pointer(FLOAT).at(image * w.height * w.width * w.pixel)
            target = w.target.as_pointer(FLOAT).at(items.index * w.channels * bins)
            samples = vertical.count * horizontal.count
            if not ratio:
                with f.when(f.maximum(vertical.count, horizontal.count) > _MOST_SAMPLES):
                    w.fault.as_pointer(INT64).store(f.value(1))
            share = (f.value(1.0, FLOAT) / f.maximum(samples, 1).convert("sitofp", FLOAT)).broadcast()
            with f.loop(0, bins, step=LANES) as blocks:
                with f.loop(0, LANES) as lanes:
                    own, bin_ = tile.at(lanes.index * w.pixel), f.minimum(blocks.index + lanes.index, bins - 1)
                    with f.loop(0, w.channels, step=LANES) as channels:
                        own.store(zero, channels.index)
                    with f.loop(0, vertical.count) as outer, f.loop(0, horizontal.count) as inner:
                        row = vertical.sample(bin_ // w.columns, outer.index)
                        column = horizontal.sample(bin_ % w.columns, inner.index)
                        corners, inside = _list_corners(source, row, column, w)
                        is_first = (outer.index.equals(0) & inner.index.equals(0)).broadcast()
                        with f.loop(0, w.channels, step=LANES) as channels:
                            parts = [f.select(inside, x.load_vector(channels.index) * weight, zero) for x, weight in corners]
                            if mode == "avg":
                                parts = [part * share for part in parts]
                            own.store(_combine(f, mode, own.load_vector(channels.index), parts, is_first), channels.index)
                store_transposed(f, tile, w.pixel, target.at(blocks.index), bins, w.channels, bins - blocks.index, rest)
    return str(module)


def _list_corners(
    source: Pointer, row: tuple[Value, ...], column: tuple[Value, ...], w: SimpleNamespace
) -> tuple[list[tuple[Pointer, Value]], Value]:
    """(pixel, weight) of the four corners of a sample, and whether it is inside of the image."""
    (top, bottom, y, inside_y), (left, right, x, inside_x) = row, column
    one = y.function.value(1.0, y.type)
    corners = []
    for line, wy in ((top, one - y), (bottom, y)):
        for place, wx in ((left, one - x), (right, x)):
            corners.append((source.at((line * w.width + place) * w.pixel), (wy * wx).convert("fptrunc", FLOAT).broadcast()))
    return corners, (inside_y & inside_x).broadcast()


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
        """(lower index, higher index, weight of the higher one in f64, whether the sample is inside) of a sample of a bin."""
        f = self._f
        part = (index.convert("sitofp", DOUBLE) + 0.5) / self.count.convert("sitofp", DOUBLE)
        at = self._start + (bin_.convert("sitofp", DOUBLE) + part) * self._bin
        size, zero = self._size.convert("sitofp", DOUBLE), f.value(0.0, DOUBLE)
        inside = (at >= -1.0) & (size >= at)
        at = f.select(inside, f.maximum(at, zero), zero)
        low = f.minimum(f.math("floor", at), size - 1.0)
        high = f.minimum(low + 1.0, size - 1.0)
        weight = f.select(low >= size - 1.0, zero, at - low)
        return low.convert("fptosi", INT64), high.convert("fptosi", INT64), weight, inside

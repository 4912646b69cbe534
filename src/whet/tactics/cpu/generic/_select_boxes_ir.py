"""Non-maximum suppression as LLVM IR: a radix sort of the candidates of a class, then each is compared with the selected boxes, LANES at a time."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from whet.tactics.cpu._llvm.builder import FLOAT, INT16, INT32, INT64, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import emit_thread_count, emit_thread_index, parallel_kernel
from whet.tactics.cpu.generic._loops import list_context_words

_DIGITS, _RADIX = 4, 256
COUNTERS = _DIGITS * _RADIX  # of 32 bits
NAMES = ("low_0", "low_1", "high_0", "high_1", "area")  # of the arrays of selected boxes


@cache
def emit_select_ir(centered: bool, has_least: bool, wide_limit: bool) -> str:
    """`select(context)`, one item per sample and class: the indices of its selected boxes in order of their scores go to `share` words of `indices`,
    their number to `counts`. `wide_limit`: the most boxes of a class are an i64, else an i32.

    Of each thread, `work` has the candidates as (key, index) twice, the counters of the sort, and the coordinates of the selected boxes. The
    arithmetic is that of the op's reference, so that the results are equal.
    """
    places = ("boxes", "scores", "most", "iou", "least", "indices", "counts", "work")
    words = list_context_words(places, ("count", "classes", "limit", "stride"))
    module = Module()
    with parallel_kernel(module, "select", words, "items") as (f, w):
        kept, candidates = f.allocate(INT64, 1), f.allocate(INT64, 1)
        (me,) = f.choose([(emit_thread_count(w.context) > 1, lambda: [emit_thread_index(f, w.context)]), (None, lambda: [f.value(0)])])
        work = w.work + me * w.stride
        keys, others = (_Candidates(work + w.count * (8 * k), w.count) for k in range(2))
        counters = (work + w.count * 16).as_pointer(INT32)
        selected = _Selected(f, work + w.count * 16 + 4 * COUNTERS, w.limit)
        most = w.most.as_pointer(INT64 if wide_limit else INT32).load()
        limit = f.minimum(most if wide_limit else most.convert("sext", INT64), w.limit)
        threshold = w.iou.as_pointer(FLOAT).load()
        least = w.least.as_pointer(FLOAT).load() if has_least else None
        with f.loop(w.begin, w.end) as items:
            _collect(f, w.scores.as_pointer(FLOAT).at(items.index * w.count), w.count, least, keys, candidates)
            number = candidates.load()
            with f.when(number > 1):
                _sort(f, keys, others, counters, number)
            kept.store(0)
            selected.clear_block(f.value(0))
            boxes, indices = w.boxes.as_pointer(FLOAT).at(items.index // w.classes * (w.count * 4)), w.indices.as_pointer(INT32)
            with f.loop(0, number) as ranks, f.when(kept.load() < limit):
                index = keys.indices.load(ranks.index)
                box = _load_box(f, boxes.at(index.convert("sext", INT64) * 4), centered)
                at = kept.load()
                with f.when(selected.overlaps(box, at, threshold) ^ 1):
                    selected.append(box, at)
                    indices.store(index, items.index * w.limit + at)
                    kept.store(at + 1)
            w.counts.as_pointer(INT64).store(kept.load(), items.index)
    return str(module)


@cache
def emit_rows_ir() -> str:
    """`list_rows(context)`, one item: rows (sample, class, box) of the selected boxes, zeros in the other rows, and the number of boxes."""
    module = Module()
    words = list_context_words(("indices", "counts", "rows", "total"), ("groups", "classes", "limit", "most"))
    with parallel_kernel(module, "list_rows", words, "items") as (f, w), f.loop(w.begin, w.end):
        rows, indices = w.rows.as_pointer(INT64), w.indices.as_pointer(INT32)
        with f.loop(0, w.groups, carried=[f.value(0)]) as groups:
            (first,) = groups.values
            number = w.counts.as_pointer(INT64).load(groups.index)
            with f.loop(0, number) as each:
                row = rows.at((first + each.index) * 3)
                box = indices.load(groups.index * w.limit + each.index).convert("sext", INT64)
                for k, value in enumerate((groups.index // w.classes, groups.index % w.classes, box)):
                    row.store(value, k)
            groups.next = [first + number]
        (total,) = groups.results
        with f.loop(total * 3, w.most * 3) as rest:
            rows.store(0, rest.index)
        w.total.as_pointer(INT64).store(total)
    return str(module)


class _Candidates:
    """The memory of `count` keys and the indices of their boxes."""

    def __init__(self, address: Value, count: Value) -> None:
        self.keys, self.indices = address.as_pointer(INT32), (address + count * 4).as_pointer(INT32)

    def store(self, key: Value, index: Value, at: Value) -> None:
        self.keys.store(key, at)
        self.indices.store(index, at)


def _collect(f: Function, scores: Pointer, count: Value, least: Value | None, to: _Candidates, number: Pointer) -> None:
    """The keys of boxes with scores above `least`, in order of the boxes; keys ascend as scores descend, NaN is last."""
    with f.loop(0, count, carried=[f.value(0)]) as each:
        (at,) = each.values
        score = scores.load(each.index)
        bits = (score + 0.0).convert("bitcast", INT32)  # one zero
        sign = f.emit(INT32, f"ashr {bits}, 31", bits)
        key = f.select(score.is_nan(), f.value(-1, INT32), bits ^ ((sign ^ -1) & 0x7FFFFFFF))
        to.store(key, each.index.convert("trunc", INT32), at)
        each.next = [at + 1 if least is None else at + (score > least).convert("zext", INT64)]
    number.store(each.results[0])


def _sort(f: Function, a: _Candidates, b: _Candidates, counters: Pointer, number: Value) -> None:
    """Sorts by keys, as unsigned numbers, and keeps the order of equal ones. `b` is working memory."""
    with f.loop(0, COUNTERS, step=LANES) as zeros:
        counters.store(f.value(0, INT32).broadcast(), zeros.index)

    def find_counter(key: Value, digit: int) -> Value:
        return ((key >> (8 * digit)) & (_RADIX - 1)).convert("zext", INT64) + digit * _RADIX

    with f.loop(0, number) as each:
        key = a.keys.load(each.index)
        for digit in range(_DIGITS):
            at = find_counter(key, digit)
            counters.store(counters.load(at) + 1, at)
    for digit in range(_DIGITS):  # the first position of each digit
        with f.loop(digit * _RADIX, (digit + 1) * _RADIX, carried=[f.value(0, INT32)]) as sums:
            (first,) = sums.values
            following = first + counters.load(sums.index)
            counters.store(first, sums.index)
            sums.next = [following]
    for digit in range(_DIGITS):
        source, target = (a, b) if digit % 2 == 0 else (b, a)
        with f.loop(0, number) as each:
            key = source.keys.load(each.index)
            at = find_counter(key, digit)
            place = counters.load(at)
            counters.store(place + 1, at)
            target.store(key, source.indices.load(each.index), place.convert("sext", INT64))


def _load_box(f: Function, box: Pointer, centered: bool) -> SimpleNamespace:
    """The lowest and highest coordinates along both axes, and the area."""
    first, second = [box.load(k) for k in range(2)], [box.load(k) for k in range(2, 4)]
    if centered:
        halves = [x * 0.5 for x in second]
        lows, highs = [x - h for x, h in zip(first, halves, strict=True)], [x + h for x, h in zip(first, halves, strict=True)]
    else:
        pairs = list(zip(first, second, strict=True))
        lows, highs = ([_keep_nan(f, a, choose(a, b)) for a, b in pairs] for choose in (f.minimum, f.maximum))
    area = (highs[0] - lows[0]) * (highs[1] - lows[1])
    return SimpleNamespace(low_0=lows[0], low_1=lows[1], high_0=highs[0], high_1=highs[1], area=area)


def _keep_nan(f: Function, x: Value, result: Value) -> Value:
    """`result`, or `x` if that is NaN; minimum and maximum give the second operand if one is NaN."""
    return f.select(x.is_nan(), x, result)


class _Selected:
    """The selected boxes, an array for each coordinate. The areas of a block's unused lanes are zero: nothing overlaps them."""

    def __init__(self, f: Function, address: Value, limit: Value) -> None:
        size = (limit + 2 * LANES) * 4
        self._f, self._arrays = f, {name: (address + size * k).as_pointer(FLOAT) for k, name in enumerate(NAMES)}

    def clear_block(self, at: Value) -> None:
        for array in self._arrays.values():
            array.store(self._f.value(0.0, FLOAT).broadcast(), at)

    def append(self, box: SimpleNamespace, at: Value) -> None:
        """Stores a box at index `at`, and clears the next block when its first lane follows."""
        for name, array in self._arrays.items():
            array.store(getattr(box, name), at)
        with self._f.when(((at + 1) % LANES).equals(0)):
            self.clear_block(at + 1)

    def overlaps(self, box: SimpleNamespace, count: Value, threshold: Value) -> Value:
        """i1: whether the intersection over union of `box` with one of the first `count` boxes is above the threshold."""
        f, zero = self._f, self._f.value(0.0, FLOAT).broadcast()
        one = {name: getattr(box, name).broadcast() for name in NAMES}
        limit = threshold.broadcast()
        with f.repeat(f.value(0)) as blocks:
            (at,) = blocks.values
            other = {name: self._arrays[name].load(at, LANES) for name in NAMES}
            sides = [f.minimum(other[f"high_{k}"], one[f"high_{k}"]) - f.maximum(other[f"low_{k}"], one[f"low_{k}"]) for k in range(2)]
            shared = f.maximum(sides[0], zero) * f.maximum(sides[1], zero)
            union = other["area"] + one["area"] - shared
            over = (shared > zero) & (other["area"] > zero) & (one["area"] > zero) & (union > zero) & (shared / union > limit)
            mask = f.emit(INT16, f"bitcast {over} to i16", over)
            following = at + LANES
            blocks.repeat_if((following < count) & mask.equals(0), following)
        return mask.differs(0)

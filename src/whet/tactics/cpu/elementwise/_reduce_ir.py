"""LLVM IR of reductions: loops over the kept axes, in each the reduced axes; the innermost axis in memory is in vectors, kept or reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from whet.network import F32, DType
from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Type, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.packing import FloatPointer, make_float_pointer
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

VECTORS = 4  # accumulators of one item if the innermost axis is kept: a thread reads this many adjacent vectors
_BLOCK = 4096  # elements that accumulators sum before their sum is added to the total, for accuracy
_ROWS = 64  # the same if the innermost axis is kept
INITIAL = {"ReduceMax": float("-inf"), "ReduceMin": float("inf"), "ReduceProd": 1.0}
KINDS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare")


Body = Callable[[FloatPointer, list[Value]], list[Value]]


class Reduction:
    """What one reduction does to values and accumulators. `factor`: the address of a mean's factor."""

    def __init__(self, f: Function, op: str, factor: Pointer | None = None) -> None:
        self._f, self._math, self._op, self._factor = f, Math(f), op, factor

    def initial(self, lanes: int) -> Value:
        return self._f.value(INITIAL.get(self._op, 0.0), Type("float", lanes))

    def step(self, accumulator: Value, x: Value) -> Value:
        if self._op in ("ReduceL2", "ReduceSumSquare"):
            return self._f.fma(x, x, accumulator)
        return self.combine(accumulator, self._f.math("fabs", x) if self._op == "ReduceL1" else x)

    def combine(self, a: Value, b: Value) -> Value:
        match self._op:
            case "ReduceMax":
                return self._math.maximum(a, b)
            case "ReduceMin":
                return self._math.minimum(a, b)
            case "ReduceProd":
                return a * b
        return a + b

    def finish(self, a: Value) -> Value:
        if self._op == "ReduceMean":
            assert self._factor is not None
            factor = self._factor.load()
            return a * (factor.broadcast(a.lanes) if a.lanes > 1 else factor)
        return self._f.math("sqrt", a) if self._op == "ReduceL2" else a

    def combine_lanes(self, a: Value) -> Value:
        """All lanes combined, as a scalar."""
        f, lanes = self._f, a.lanes
        if lanes == 1:
            return a
        distance = lanes // 2
        while distance:
            a = self.combine(a, f.shuffle(a, a, [(i + distance) % lanes for i in range(lanes)]))
            distance //= 2
        return f.emit(FLOAT, f"extractelement {a}, i32 0", a)


def list_context_words(kept_axes: int, reduced_axes: int) -> tuple[str, ...]:
    """The context: addresses of input, result and the factor of a mean; items, the innermost axis's length and its chunks; sizes and strides of the
    other kept axes and of the other reduced axes; a thread's share."""
    axes = [*(f"kept{k}" for k in range(kept_axes)), *(f"reduced{k}" for k in range(reduced_axes))]
    return ("x", "y", "items", "width", "chunks", *(f"{a}_{w}" for a in axes for w in ("size", "stride")), "share", "factor")


@cache
def reduce_ir(op: str, kept_axes: int, reduced_axes: int, inner_reduced: bool, tail: int, stored: DType = F32) -> str:
    """`reduce(context)`. `kept_axes`, `reduced_axes`: number of axes besides the innermost one. `inner_reduced`: the innermost axis is reduced.
    `tail`: elements of the innermost axis after its whole vectors (after whole chunks of VECTORS vectors if it is kept). `stored`: type
    of the values in memory."""
    module = Module()
    with parallel_kernel(module, "reduce", list_context_words(kept_axes, reduced_axes), "items") as (f, w):
        words = vars(w)
        kind = Reduction(f, op, w.factor.as_pointer(FLOAT))
        source, target = (make_float_pointer(word, stored) for word in (w.x, w.y))
        with f.loop(w.begin, w.end) as items:
            position: Value = items.index if inner_reduced else items.index // w.chunks
            row = position
            offset: Value | int = 0
            for k in reversed(range(kept_axes)):
                index = position % words[f"kept{k}_size"] if k else position
                position = position // words[f"kept{k}_size"] if k else position
                offset = index * words[f"kept{k}_stride"] + offset
            at = source.at(offset)
            axes = [(words[f"reduced{k}_size"], words[f"reduced{k}_stride"]) for k in range(reduced_axes)]
            if inner_reduced:
                target.store(kind.finish(reduce_rows(f, kind, at, axes, w.width, tail)), items.index)
            else:
                start = items.index % w.chunks * (VECTORS * LANES)
                _emit_inner_kept(f, kind, at.at(start), target.at(row * w.width + start), axes, w.width - start, tail)
    return str(module)


def reduce_rows(f: Function, kind: Reduction, at: FloatPointer, axes: Sequence[tuple[Value, Value]], width: Value, tail: int) -> Value:
    """The result of one item, whose innermost axis is reduced: blocks of it have accumulators of their own."""
    whole = width - tail if tail else width
    widths = [lanes for lanes in (8, 4, 2, 1) if tail & lanes]

    def runs(pointer: FloatPointer, totals: list[Value]) -> list[Value]:
        with f.loop(0, whole, step=_BLOCK, carried=[totals[0]]) as blocks:
            end = f.minimum(blocks.index + _BLOCK, whole)
            step = VECTORS * LANES
            with f.loop(blocks.index, end - (step - 1), step=step, carried=[kind.initial(LANES)] * VECTORS) as wide:
                wide.carry(*(kind.step(v, pointer.load_vector(wide.index + LANES * k)) for k, v in enumerate(wide.values)))
            with f.loop(wide.index, end, step=LANES, carried=[wide.results[0]]) as rest:
                rest.carry(kind.step(rest.values[0], pointer.load_vector(rest.index)))
            a, b, c = wide.results[1:]
            block = kind.combine(kind.combine(rest.results[0], a), kind.combine(b, c))
            blocks.carry(kind.combine(blocks.values[0], block))
        results, done = [blocks.results[0]], 0
        for total, lanes in zip(totals[1:], widths, strict=True):
            results.append(kind.step(total, pointer.load(whole + done, lanes)))
            done += lanes
        return results

    totals = _nest(f, axes, at, [kind.initial(n) for n in (LANES, *widths)], runs)
    result = kind.combine_lanes(totals[0])
    for total in totals[1:]:
        result = kind.combine(result, kind.combine_lanes(total))
    return result


def _nest(f: Function, axes: Sequence[tuple[Value, Value]], at: FloatPointer, totals: list[Value], body: Body) -> list[Value]:
    """`body(pointer, totals)` for all indices of the axes, with carried totals."""
    if not axes:
        return body(at, totals)
    (size, stride), *rest = axes
    with f.loop(0, size, carried=totals) as loop:
        loop.carry(*_nest(f, rest, at.at(loop.index * stride), loop.values, body))
    return loop.results


def _emit_inner_kept(
    f: Function, kind: Reduction, at: FloatPointer, out: FloatPointer, axes: Sequence[tuple[Value, Value]], left: Value, tail: int
) -> None:
    """The results of one chunk of the innermost axis, which is kept; `left`: elements from the chunk's start on."""

    def emit_columns(groups: Sequence[tuple[int, int]]) -> None:
        """(first element, lanes) of each accumulator."""

        def emit_body(pointer: FloatPointer, totals: list[Value]) -> list[Value]:
            return [kind.step(total, pointer.load(first, lanes)) for total, (first, lanes) in zip(totals, groups, strict=True)]

        def emit_blocks(pointer: FloatPointer, totals: list[Value]) -> list[Value]:
            """The last reduced axis in blocks with accumulators of their own; if these are few, several rows at once, so that none waits for its last
            sum."""
            size, stride = axes[-1]
            count, rows = len(groups), max(1, VECTORS // len(groups))
            with f.loop(0, size, step=_ROWS, carried=totals) as outer:
                end = f.minimum(outer.index + _ROWS, size)
                start, values = outer.index, [kind.initial(lanes) for _, lanes in groups]
                if rows > 1:
                    with f.loop(start, end - (rows - 1), step=rows, carried=values * rows) as many:
                        sums = [many.values[k * count : (k + 1) * count] for k in range(rows)]
                        many.carry(*(s for k in range(rows) for s in emit_body(pointer.at((many.index + k) * stride), sums[k])))
                    start, values = many.index, many.results[:count]
                    for k in range(1, rows):
                        values = [kind.combine(a, b) for a, b in zip(values, many.results[k * count :], strict=False)]
                with f.loop(start, end, carried=values) as loop:
                    loop.carry(*emit_body(pointer.at(loop.index * stride), loop.values))
                outer.carry(*(kind.combine(a, b) for a, b in zip(outer.values, loop.results, strict=True)))
            return outer.results

        initial = [kind.initial(lanes) for _, lanes in groups]
        totals = _nest(f, axes[:-1], at, initial, emit_blocks) if axes else emit_body(at, initial)
        for total, (first, _) in zip(totals, groups, strict=True):
            out.store(kind.finish(total), first)

    with f.when(left >= VECTORS * LANES):
        emit_columns([(LANES * k, LANES) for k in range(VECTORS)])
    if tail:
        groups = [(LANES * k, LANES) for k in range(tail // LANES)]
        done = LANES * len(groups)
        for lanes in (8, 4, 2, 1):
            if tail % LANES & lanes:
                groups.append((done, lanes))
                done += lanes
        with f.when(left < VECTORS * LANES):
            emit_columns(groups)

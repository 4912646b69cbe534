"""LLVM IR of LSTM, GRU and RNN: a thread computes whole sequences, products as matrix times vector.

Weights are packed in blocks of BLOCK rows, each block with its columns one after another, so that a product reads them in order. The products of
STEPS successive inputs are computed together. Gates have whole vectors of units; units of padding stay zero.
"""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm.builder import FLOAT, INT32, INT64, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.math import Math
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel

BLOCK, STEPS = 64, 4
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
WORDS = (
    "x", "y", "lengths", "first_h", "first_c", "last_h", "last_c", "scratch", "items", "batch", "time", "size", "units", "padded_units", "rows",
    "reversed", "x_item", "x_time", "y_item", "y_time", "y_direction", "state_item", "state_direction", "share", "weights", "recurrence", "biases",
)  # fmt: skip
"""The context: addresses (0: absent; `lengths` of the sequences), items (sequences times directions), sequences, steps, elements of an input, units,
units of a gate with padding, rows of a product (all gates, a multiple of BLOCK), 1 if the first direction is reversed, strides in elements, packed
operands of all directions."""


def count_scratch_floats(rows: int, padded_units: int) -> int:
    """Of one item: products of inputs, of the state, h, c."""
    return (STEPS + 1) * rows + 2 * padded_units


@cache
def emit_recurrent_ir(
    op: str, activations: tuple[str, ...], states: tuple[bool, bool], tail: int, has_lengths: bool = False, resets_before: bool = False
) -> str:
    """`recurrent(context)`. `states`: whether the first h and c are given. `tail`: units after the last whole vector. `has_lengths`: sequences have
    their own numbers of steps (i32), and results after them are zeros. `resets_before`: a GRU multiplies the state by its reset gate before the
    product."""
    module = Module()
    products = {n: _emit_product(module, n) for n in (1, STEPS)}
    copy = _copy(module, tail)
    with parallel_kernel(module, "recurrent", WORDS, "items") as (f, w):
        with f.loop(w.begin, w.end) as items:
            direction, item = items.index // w.batch, items.index % w.batch
            is_reversed = (direction + w.reversed).differs(0)
            time = w.time
            if has_lengths:
                time = f.minimum(f.maximum(w.lengths.as_pointer(INT32).load(item).convert("sext", INT64), 0), time)
            first, step = f.select(is_reversed, time - 1, 0), f.select(is_reversed, -1, 1)
            block = w.rows * (STEPS + 1) + w.padded_units * 2
            scratch = w.scratch.as_pointer(FLOAT).at(items.index * block)
            from_state, h = scratch.at(w.rows * STEPS), scratch.at(w.rows * (STEPS + 1))
            c = h.at(w.padded_units)
            weights = w.weights.as_pointer(FLOAT).at(direction * (w.rows * w.size))
            recurrence = w.recurrence.as_pointer(FLOAT).at(direction * (w.rows * w.units))
            bias = w.biases.as_pointer(FLOAT).at(direction * (w.rows * 2))
            state = item * w.state_item + direction * w.state_direction
            zero = f.value(0.0, FLOAT).broadcast()
            with f.loop(0, w.padded_units * 2, step=LANES) as clear:
                h.store(zero, clear.index)
            for given, word, target in zip(states, (w.first_h, w.first_c), (h, c), strict=True):
                if given:
                    f.call(copy, word.as_pointer(FLOAT).at(state), target, w.units)
            x = w.x.as_pointer(FLOAT).at(item * w.x_item)
            y = w.y.as_pointer(FLOAT).at(item * w.y_item + direction * w.y_direction)
            with f.loop(0, time, step=STEPS) as chunks:
                count = f.minimum(time - chunks.index, STEPS)
                at = x.at((first + step * chunks.index) * w.x_time)
                with f.when(count.equals(STEPS)):
                    f.call(products[STEPS], at, step * w.x_time, weights, bias, scratch, w.size, w.rows)
                with f.when(count < STEPS):
                    with f.loop(0, count) as rest:
                        row = at.at(rest.index * (step * w.x_time))
                        f.call(products[1], row, 0, weights, bias, scratch.at(rest.index * w.rows), w.size, w.rows)
                with f.loop(0, count) as inner:
                    f.call(products[1], h, 0, recurrence, bias.at(w.rows), from_state, w.units, w.rows)
                    if resets_before:
                        with f.loop(0, w.padded_units, step=LANES) as units:
                            gates = _Gates(f, scratch.at(inner.index * w.rows), from_state, w.padded_units, units.index)
                            _reset(f, activations, gates, h.at(units.index), c.at(units.index))
                        f.call(products[1], c, 0, recurrence, bias.at(w.rows), from_state, w.units, w.rows)
                    with f.loop(0, w.padded_units, step=LANES) as units:
                        gates = _Gates(f, scratch.at(inner.index * w.rows), from_state, w.padded_units, units.index)
                        _update(f, op, activations, gates, h.at(units.index), c.at(units.index), resets_before)
                    f.call(copy, h, y.at((first + step * (chunks.index + inner.index)) * w.y_time), w.units)
            if has_lengths:
                with f.loop(0, w.padded_units, step=LANES) as clear:
                    scratch.store(zero, clear.index)
                with f.loop(time, w.time) as rest:
                    f.call(copy, scratch, y.at(rest.index * w.y_time), w.units)
            for word, source in ((w.last_h, h), *(((w.last_c, c),) if op == "LSTM" else ())):
                f.call(copy, source, word.as_pointer(FLOAT).at(state), w.units)
    return str(module)


class _Gates:
    """The products of one vector of units, by gate."""

    def __init__(self, f: Function, from_input: Pointer, from_state: Pointer, stride: Value, unit: Value) -> None:
        self._f, self._from_input, self._from_state, self._stride, self._unit = f, from_input, from_state, stride, unit

    def input(self, gate: int) -> Value:
        return self._from_input.load_vector(self._stride * gate + self._unit)

    def state(self, gate: int) -> Value:
        return self._from_state.load_vector(self._stride * gate + self._unit)

    def total(self, gate: int) -> Value:
        return self.input(gate) + self.state(gate)

    def replace_input(self, gate: int, value: Value) -> None:
        self._from_input.store(value, self._stride * gate + self._unit)


def _activate(f: Function, function: str, x: Value) -> Value:
    math = Math(f)
    match function:
        case "sigmoid":
            return math.sigmoid(x)
        case "tanh":
            return math.tanh(x)
    return math.maximum(x, f.value(0.0, x.type))


def _reset(f: Function, activations: tuple[str, ...], gates: _Gates, h: Pointer, reset: Pointer) -> None:
    """The update gate of one vector of units replaces its product; `reset` becomes h times the reset gate."""
    z, r = (_activate(f, activations[0], gates.total(k)) for k in range(2))
    gates.replace_input(0, z)
    reset.store(r * h.load_vector())


def _update(f: Function, op: str, activations: tuple[str, ...], gates: _Gates, h: Pointer, c: Pointer, is_reset: bool) -> None:
    """The next h (and c) of one vector of units. `is_reset`: of a GRU, after `_reset` and the product of its result."""

    def activate(index: int, x: Value) -> Value:
        return _activate(f, activations[index], x)

    if op == "LSTM":  # gates in ONNX's order i, o, f, c
        i, o, forget = (activate(0, gates.total(k)) for k in range(3))
        cell = f.fma(forget, c.load_vector(), i * activate(1, gates.total(3)))
        c.store(cell)
        h.store(o * activate(2, cell))
    elif is_reset:
        new = activate(1, gates.total(2))
        h.store(f.fma(gates.input(0), h.load_vector() - new, new))
    elif op == "GRU":  # z, r, h
        z, r = (activate(0, gates.total(k)) for k in range(2))
        new = activate(1, f.fma(r, gates.state(2), gates.input(2)))
        h.store(f.fma(z, h.load_vector() - new, new))
    else:
        h.store(activate(0, gates.total(0)))


def _emit_product(module: Module, count: int) -> Function:
    """`count` products of the packed matrix with vectors at stride `step`, plus the bias; results at stride `rows` (elements)."""
    with module.function(f"product{count}", ["float*", "i64", "float*", "float*", "float*", "i64", "i64"]) as f:
        x, step, weights, bias, out, size, rows = f.arguments
        assert isinstance(x, Pointer)
        assert isinstance(weights, Pointer)
        assert isinstance(bias, Pointer)
        assert isinstance(out, Pointer)
        vectors = BLOCK // LANES
        with f.loop(0, rows, step=BLOCK) as blocks:
            block = weights.at(blocks.index * size)
            parts = [list(range(vectors))] if count == 1 else [[k] for k in range(vectors)]
            for part in parts:
                start = [bias.load_vector(blocks.index + LANES * k) for k in part]
                with f.loop(0, size, carried=start * count) as columns:
                    column = block.at(columns.index * BLOCK)
                    w = [column.load_vector(LANES * k) for k in part]
                    sums = []
                    for n in range(count):
                        factor = x.load(columns.index + (step * n if n else 0)).broadcast()
                        sums += [f.fma(factor, v, columns.values[n * len(part) + j]) for j, v in enumerate(w)]
                    columns.carry(*sums)
                for n in range(count):
                    for j, k in enumerate(part):
                        target = out.at(rows * n) if n else out
                        target.store(columns.results[n * len(part) + j], blocks.index + LANES * k)
    return f


def _copy(module: Module, tail: int) -> Function:
    """Copies the units of a state."""
    with module.function("copy", ["float*", "float*", "i64"]) as f:
        source, target, count = f.arguments
        assert isinstance(source, Pointer)
        assert isinstance(target, Pointer)
        whole = count - tail
        with f.loop(0, whole, step=LANES) as vectors:
            target.store(source.load_vector(vectors.index), vectors.index)
        done = 0
        for lanes in (8, 4, 2, 1):
            if tail & lanes:
                target.store(source.load(whole + done, lanes), whole + done)
                done += lanes
    return f

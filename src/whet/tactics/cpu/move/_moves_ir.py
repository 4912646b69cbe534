"""Rows of a Moves layer as LLVM IR: 16 columns at a time; values that depend only on the row are computed once per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

from whet.tactics._moves_indices import COLUMN, ROW, Place, Refused
from whet.tactics._moves_tree import (
    Moves,
    Node,
    compute_height,
    fix_atom,
    list_blocked_loads,
    list_choices,
    list_unconditional_nodes,
    replace_node,
)
from whet.tactics.cpu._llvm.activation import Activations
from whet.tactics.cpu._llvm.builder import FLOAT, LANES, Function, Module, Pointer, Value
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel, range_function

LONGEST = 8000  # instructions: compiling longer code takes more time than it saves
_CASES = 8  # start offsets of rows within a block of channels; each has separate code
_BINARY = {"Add": Value.__add__, "Div": Value.__truediv__, "Mul": Value.__mul__, "Sub": Value.__sub__}
Lanes = frozenset[int]
_ALL = frozenset(range(LANES))


def list_context_words(sources: int) -> tuple[str, ...]:
    """The context of `moves`: addresses of the result, the constants and the sources; rows, rows per thread."""
    return ("target", "numbers", *(f"source{k}" for k in range(sources)), "rows", "share")


def emit_moves_ir(moves: Moves, has_avx512dq: bool, longest: int = LONGEST) -> str:
    """`moves(context)`. Raises Refused for more than `longest` instructions, and for trees without code."""
    module = Module()
    with parallel_kernel(module, "moves", list_context_words(len(moves.sources)), "rows") as (f, words):
        _emit_rows(f, words, moves, has_avx512dq, longest)
    return str(module)


def emit_rows_function(module: Module, moves: Moves, has_avx512dq: bool) -> Function:
    """Only `moves.part(context, begin, end)`, for kernels that call it for some rows. Raises Refused."""
    with range_function(module, "moves", list_context_words(len(moves.sources))) as (f, words):
        _emit_rows(f, words, moves, has_avx512dq, LONGEST)
    return f


def _emit_rows(f: Function, words: SimpleNamespace, moves: Moves, has_avx512dq: bool, longest: int) -> None:
    activations = Activations(f, has_avx512dq)
    target, numbers, *sources = (getattr(words, w).as_pointer(FLOAT) for w in list_context_words(len(moves.sources))[:-2])
    with f.loop(words.begin, words.end) as rows:
        _Row(f, moves, activations, longest, rows.index, target.at(rows.index * moves.columns), numbers, sources).emit(moves.root, {})


class _Row:
    """Emits one row. `known` are values of enclosing blocks: of indices, and of (node, lanes)."""

    def __init__(
        self, f: Function, moves: Moves, activations: Activations, longest: int, row: Value, target: Pointer, numbers: Pointer,
        sources: list[Pointer],
    ) -> None:  # fmt: skip
        self.f, self.moves, self.activations, self.longest = f, moves, activations, longest
        self.row, self.target, self.numbers, self.sources = row, target, numbers, sources
        self._emitters = {
            "source": self._source, "constant": self._constant, "blocked": self._blocked, "choice": self._choice, "step": self._step
        }  # fmt: skip

    def emit(self, root: Node, known: dict) -> list[Value]:
        """Emits a row of `root`: parts concatenated by rows in one block each, then column by column."""
        f = self.f
        by_rows = next((c for c in list_choices(root) if not c[1].by_column), None)
        if by_rows is not None:
            return self._cases(by_rows[1], by_rows[2], [replace_node(root, by_rows, part) for part in by_rows[3]], known)
        begins = next((a for load in list_blocked_loads(root) for a, _ in load[3].row.terms), None)
        if begins is not None:
            if begins in (ROW, COLUMN) or begins[3] > _CASES:
                raise Refused("rows begin at too many different offsets in blocks of channels")
            values = range(begins[3])
            return self._cases(Place(0, ((begins, 1),)), [v + 1 for v in values], [fix_atom(root, begins, v) for v in values], known)
        with f.interleaved() as begin_part:  # a reorder buffer of some hundred instructions holds at most four chains of a sigmoid
            for first in range(0, self.moves.columns, LANES):
                begin_part()
                lanes = frozenset(range(min(LANES, self.moves.columns - first)))
                value, target = self._value(root, first, lanes, known), self.target.at(first)
                if lanes == _ALL:
                    target.store(value)
                else:
                    target.store_masked(value, _mask(lanes))
        if f.size > self.longest:
            raise Refused(f"more than {self.longest} instructions for a row")
        return []

    def _cases(self, place: Place, limits: Sequence[int], roots: Sequence[Node], known: dict) -> list[Value]:
        """Emits one block per root; the block of the first limit above the index `place` runs."""
        if len(roots) == 1:
            return self.emit(roots[0], known)
        index = self._index(place, known)
        first = partial(self.emit, roots[0], dict(known))
        return self.f.choose([(index < limits[0], first), (None, partial(self._cases, place, limits[1:], roots[1:], known))])

    def _index(self, p: Place, known: dict) -> Value:
        """An index that depends only on the row."""
        if p in known:
            return known[p]
        total: Value | None = None
        for atom, n in p.terms:
            if atom == COLUMN:
                raise Refused("the row of a block depends on the column")
            if atom == ROW:
                value = self.row
            else:
                how, inner, by, _ = atom
                key = Place(0, ((atom, 1),))
                if key not in known:
                    dividend = self._index(inner, known)
                    known[key] = dividend // by if how == "div" else dividend % by
                value = known[key]
            value = value * n
            total = value + p.offset if total is None else value + total
        known[p] = self.f.value(p.offset) if total is None else total
        return known[p]

    def _value(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        """16 floats of a node from column `first`; only `lanes` are used."""
        if node[0] == "number":
            return self.f.vector([node[1]] * LANES)
        key = (node, first)
        if key not in known or not lanes <= known[key][1]:
            known[key] = (self._emitters[node[0]](node, first, lanes, known), lanes)
        return known[key][0]

    def _source(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        return self._load(self.sources[node[1]], node[2], first, lanes, known)

    def _constant(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        return self._load(self.numbers, node[2].plus(node[1]), first, lanes, known)

    def _load(self, base: Pointer, p: Place, first: int, lanes: Lanes, known: dict) -> Value:
        if p.step not in (0, 1):
            raise Refused(f"adjacent values of a result row have a stride of {p.step} elements")
        at = self._address(base, p.row, p.offset + p.step * first, known)
        return self._load_lanes(at, lanes, self._zeros()) if p.step else at.load().broadcast()

    def _blocked(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        """Adjacent channels of a pixel, which may span several blocks."""
        _, which, place, channel, length, size = node
        if place.step or channel.step not in (0, 1):
            raise Refused("adjacent values of a result row are not adjacent channels")
        base, offset = self.sources[which], place.offset
        if not channel.step:
            return self._address(base, place.row, offset + channel.offset // size * length + channel.offset % size, known).load().broadcast()
        begin, value = channel.offset + first, self._zeros()
        for block in sorted({(begin + i) // size for i in lanes}):
            mine = frozenset(i for i in lanes if (begin + i) // size == block)
            value = self._load_lanes(self._address(base, place.row, offset + block * length + begin - block * size, known), mine, value)
        return value

    def _address(self, base: Pointer, row: Place, offset: int, known: dict) -> Pointer:
        """The address of the element `offset` after the row's index."""
        if (base, row) not in known:
            known[base, row] = base.at(self._index(row, known))
        return known[base, row].at(offset)

    def _zeros(self) -> Value:
        return self.f.vector([0.0] * LANES)

    def _load_lanes(self, at: Pointer, lanes: Lanes, others: Value) -> Value:
        """Adjacent floats in their lanes; the other lanes hold `others`."""
        return at.load_vector() if lanes == _ALL else at.load_masked(_mask(lanes), others)

    def _choice(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        """Parts concatenated along the row: each lane belongs to one part."""
        _, place, limits, parts = node
        if place.terms != ((COLUMN, 1),):
            raise Refused("parts join at different columns of different rows")
        for shared in sorted((n for n in set.intersection(*(list_unconditional_nodes(p) for p in parts)) if n[0] != "choice"), key=compute_height):
            self._value(shared, first, lanes, known)
        result: Value | None = None
        start = 0
        for limit, part in zip(limits, parts, strict=True):
            mine = frozenset(i for i in lanes if start <= first + i + place.offset < limit)
            start = limit
            if mine:
                value = self._value(part, first, mine, known)
                result = value if result is None else self.f.select(self.f.mask(_mask(mine)), value, result)
        assert result is not None
        return result

    def _step(self, node: Node, first: int, lanes: Lanes, known: dict) -> Value:
        _, op, operands, _ = node
        if op == "Pow" and operands[1] == ("number", 2.0):
            op, operands = "Mul", (operands[0], operands[0])
        a, *more = (self._value(p, first, lanes, known) for p in operands)
        if op in _BINARY and len(more) == 1:
            return _BINARY[op](a, more[0])
        if more:
            raise Refused(f"the kernel has no {op}")
        if op == "Neg":
            return -a
        if op in ("Abs", "Sqrt"):
            return self.f.math("fabs" if op == "Abs" else "sqrt", a)
        if op == "Relu":
            zeros = self._zeros()
            return self.f.select(a < zeros, zeros, a)
        if op == "Sigmoid":
            sigmoid = self.activations.sigmoid(a)
            # The vector instructions propagate NaN; integer arithmetic on the exponent does not, so NaN is restored
            return sigmoid if self.activations.keeps_nan else self.f.select(a.is_nan(), a, sigmoid)
        raise Refused(f"the kernel has no {op}")


def _mask(lanes: Lanes) -> list[bool]:
    return [i in lanes for i in range(LANES)]

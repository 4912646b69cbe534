"""Rows of a layer that moves numbers and computes with them, as LLVM IR: 16 columns at a time, what depends on the row alone once a row."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from whet.tactics._moves_indices import COLUMN, ROW, Place, Refused
from whet.tactics._moves_tree import BLOCK, Moves, Node, always, blocked, choices, fixed, height, replaced
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.ir import FLOATS, WIDE, vector
from whet.tactics.cpu._llvm.silu import constants, declarations, sigmoid

LONGEST = 8000  # lines of code: beyond, compiling takes longer than it can gain
_CASES = 8  # values of what decides where in a block of channels a row begins: each has code of its own
_BITS = f"<{WIDE} x i1>"
_BINARY = {"Add": "fadd", "Div": "fdiv", "Mul": "fmul", "Sub": "fsub"}
_VALUE = re.compile(r"%[\w.]+")
Lanes = frozenset[int]
_ALL = frozenset(range(WIDE))


def words(sources: int) -> tuple[str, ...]:
    """The context of `moves`: addresses of the result, the constants and the sources; rows, how many a thread takes."""
    return ("target", "numbers", *(f"source{k}" for k in range(sources)), "rows", "share")


def moves_ir(made: Moves, estimate: bool) -> str:
    """`moves(context)`; `estimate`: the CPU has AVX-512 (F and DQ). Raises Refused."""
    names = words(len(made.sources))
    return "\n".join([declarations(estimate), needed(), jit.opening("moves", names, "rows"), _rows(made, estimate)])


def moves_part(made: Moves, estimate: bool) -> str:
    """`moves.part(context, from, end)` alone, for a kernel that calls it for some rows; what it declares is `needed`, and SiLU's. Raises Refused."""
    return jit.part("moves", words(len(made.sources))) + _rows(made, estimate)


def needed() -> str:
    """Declarations of what the rows' code calls beside SiLU's."""
    return f"""
declare {FLOATS} @llvm.sqrt.v{WIDE}f32({FLOATS})
declare {FLOATS} @llvm.masked.load.v{WIDE}f32.p0v{WIDE}f32({FLOATS}*, i32, {_BITS}, {FLOATS})
declare void @llvm.masked.store.v{WIDE}f32.p0v{WIDE}f32({FLOATS}, {FLOATS}*, i32, {_BITS})"""


def _rows(made: Moves, estimate: bool) -> str:
    """The work on rows %from to %end, up to the function's end."""
    writer = _Writer(made, estimate)
    writer.rows(made.root, {})
    bases = "\n".join(f"  %{w}.f = inttoptr i64 %{w} to float*" for w in words(len(made.sources))[: 2 + len(made.sources)])
    newline = "\n"
    return f"""
{constants()}
{bases}
  br label %next
next:
  %row = phi i64 [ %from, %start ], [ %row1, %done ]
  %more = icmp slt i64 %row, %end
  br i1 %more, label %begin, label %over.all
begin:
  %target.o = mul i64 %row, {made.columns}
  %target.row = getelementptr float, float* %target.f, i64 %target.o
{newline.join(writer.lines)}
done:
  %row1 = add i64 %row, 1
  br label %next
over.all:
  ret void
}}
"""


class _Writer:
    """Writes the statements of one row. `known` are the values of the blocks around: of places, and of nodes with the lanes they hold for."""

    def __init__(self, made: Moves, estimate: bool) -> None:
        self.made, self.estimate = made, estimate
        self.lines: list[str] = []
        self.count = 0

    def rows(self, root: Node, known: dict) -> None:
        """A row of `root`, ending in a jump to %done: first what joins by rows, each part in a block of its own, then column by column."""
        joined = next((c for c in choices(root) if not c[1].by_column), None)
        if joined is not None:
            return self.cases(joined[1], joined[2], [replaced(root, joined, part) for part in joined[3]], known)
        begins = next((a for load in blocked(root) for a, _ in load[3].row.terms), None)
        if begins is not None:
            if begins in (ROW, COLUMN) or begins[3] > _CASES:
                raise Refused("rows begin at too many places in blocks of channels")
            values = range(begins[3])
            return self.cases(Place(0, ((begins, 1),)), [v + 1 for v in values], [fixed(root, begins, v) for v in values], known)
        before, parts = self.lines, []
        for first in range(0, self.made.columns, WIDE):
            self.lines = []
            parts.append(self.lines)
            lanes = frozenset(range(min(WIDE, self.made.columns - first)))
            value = self.value(root, first, lanes, known)
            to = self.named(f"getelementptr float, float* %target.row, i64 {first}")
            wide = self.named(f"bitcast float* {to} to {FLOATS}*")
            if lanes == _ALL:
                self.lines.append(f"  store {FLOATS} {value}, {FLOATS}* {wide}, align 4")
            else:
                self.lines.append(
                    f"  call void @llvm.masked.store.v{WIDE}f32.p0v{WIDE}f32({FLOATS} {value}, {FLOATS}* {wide}, i32 4, {_BITS} {_mask(lanes)})"
                )
        self.lines = before + woven(parts)
        if len(self.lines) > LONGEST:
            raise Refused(f"more than {LONGEST} lines of code for a row")
        self.lines.append("  br label %done")

    def cases(self, place: Place, limits: Sequence[int], roots: Sequence[Node], known: dict) -> None:
        """One block of statements for each root: the first whose limit `place` is below."""
        at = self.place(place, known)
        for limit, root in zip(limits[:-1], roots[:-1], strict=True):
            n = self.count = self.count + 1
            self.lines += [f"  %t{n} = icmp slt i64 {at}, {limit}", f"  br i1 %t{n}, label %in{n}, label %else{n}", f"in{n}:"]
            self.rows(root, dict(known))
            self.lines.append(f"else{n}:")
        self.rows(roots[-1], dict(known))

    def named(self, code: str) -> str:
        """A new value."""
        self.count += 1
        self.lines.append(f"  %v{self.count} = {code}")
        return f"%v{self.count}"

    def place(self, p: Place, known: dict) -> str:
        """A place that depends on the row alone."""
        if p in known:
            return known[p]
        total = str(p.offset)
        for atom, n in p.terms:
            if atom == COLUMN:
                raise Refused("which row of a block is read depends on the column")
            if atom == ROW:
                value = "%row"
            else:
                how, inner, by, _ = atom
                key = Place(0, ((atom, 1),))
                if key not in known:
                    known[key] = self.named(f"{'udiv' if how == 'div' else 'urem'} i64 {self.place(inner, known)}, {by}")
                value = known[key]
            value = value if n == 1 else self.named(f"mul i64 {value}, {n}")
            total = value if total == "0" else self.named(f"add i64 {value}, {total}")
        known[p] = total
        return total

    def value(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        """16 floats of a node from column `first` on, of which `lanes` count."""
        if node[0] == "number":
            return vector([node[1]] * WIDE)
        key = (node, first)
        if key not in known or not lanes <= known[key][1]:
            made: Callable[[Node, int, Lanes, dict], str] = getattr(self, f"_{node[0]}")
            known[key] = (made(node, first, lanes, known), lanes)
        return known[key][0]

    def _source(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        return self._load(f"%source{node[1]}.f", node[2], first, lanes, known)

    def _constant(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        return self._load("%numbers.f", node[2].plus(node[1]), first, lanes, known)

    def _load(self, base: str, p: Place, first: int, lanes: Lanes, known: dict) -> str:
        if p.step not in (0, 1):
            raise Refused(f"neighbours of a row of the result lie {p.step} numbers apart")
        at = self.address(base, p.row, p.offset + p.step * first, known)
        return self.wide(at, lanes, "zeroinitializer") if p.step else self.spread(at)

    def _blocked(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        """Neighbouring channels of a pixel: some lie in one block, the others in the next."""
        _, which, place, channel, length = node
        if place.step or channel.step not in (0, 1):
            raise Refused("neighbours of a row of the result are not neighbouring channels")
        base, offset = f"%source{which}.f", place.offset
        if not channel.step:
            return self.spread(self.address(base, place.row, offset + channel.offset // BLOCK * length + channel.offset % BLOCK, known))
        begin, value = channel.offset + first, "zeroinitializer"
        for block in sorted({(begin + i) // BLOCK for i in lanes}):
            mine = frozenset(i for i in lanes if (begin + i) // BLOCK == block)
            value = self.wide(self.address(base, place.row, offset + block * length + begin - block * BLOCK, known), mine, value)
        return value

    def address(self, base: str, row: Place, offset: int, known: dict) -> str:
        """The address of the element `offset` behind what the row decides."""
        if (base, row) not in known:
            known[base, row] = self.named(f"getelementptr float, float* {base}, i64 {self.place(row, known)}")
        return self.named(f"getelementptr float, float* {known[base, row]}, i64 {offset}")

    def spread(self, at: str) -> str:
        """One float in all lanes."""
        one = self.named(f"load float, float* {at}, align 4")
        wide = self.named(f"insertelement {FLOATS} undef, float {one}, i32 0")
        return self.named(f"shufflevector {FLOATS} {wide}, {FLOATS} undef, <{WIDE} x i32> zeroinitializer")

    def wide(self, at: str, lanes: Lanes, others: str) -> str:
        """Floats in a row, in their lanes; the other lanes hold `others`."""
        vector = self.named(f"bitcast float* {at} to {FLOATS}*")
        if lanes == _ALL:
            return self.named(f"load {FLOATS}, {FLOATS}* {vector}, align 4")
        how = f"{FLOATS}* {vector}, i32 4, {_BITS} {_mask(lanes)}, {FLOATS} {others}"
        return self.named(f"call {FLOATS} @llvm.masked.load.v{WIDE}f32.p0v{WIDE}f32({how})")

    def _choice(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        """Parts joined along the row: which lanes are whose is known."""
        _, place, limits, parts = node
        if place.terms != ((COLUMN, 1),):
            raise Refused("parts join elsewhere in one row than in another")
        for shared in sorted((n for n in set.intersection(*(always(p) for p in parts)) if n[0] != "choice"), key=height):
            self.value(shared, first, lanes, known)
        result, start = "", 0
        for limit, part in zip(limits, parts, strict=True):
            mine = frozenset(i for i in lanes if start <= first + i + place.offset < limit)
            start = limit
            if not mine:
                continue
            value = self.value(part, first, mine, known)
            result = value if not result else self.named(f"select {_BITS} {_mask(mine)}, {FLOATS} {value}, {FLOATS} {result}")
        return result

    def _step(self, node: Node, first: int, lanes: Lanes, known: dict) -> str:
        _, op, operands, _ = node
        if op == "Pow" and operands[1] == ("number", 2.0):
            op, operands = "Mul", (operands[0], operands[0])
        a, *more = (self.value(p, first, lanes, known) for p in operands)
        if op in _BINARY and len(more) == 1:
            return self.named(f"{_BINARY[op]} {FLOATS} {a}, {more[0]}")
        if more:
            raise Refused(f"the kernel has no {op}")
        if op == "Neg":
            return self.named(f"fneg {FLOATS} {a}")
        if op in ("Abs", "Sqrt"):
            return self.named(f"call {FLOATS} @llvm.{'fabs' if op == 'Abs' else 'sqrt'}.v{WIDE}f32({FLOATS} {a})")
        if op == "Relu":
            less = self.named(f"fcmp olt {FLOATS} {a}, zeroinitializer")
            return self.named(f"select {_BITS} {less}, {FLOATS} zeroinitializer, {FLOATS} {a}")
        if op == "Sigmoid":
            return self._sigmoid(a if a.startswith("%") else self.named(f"fadd {FLOATS} {a}, zeroinitializer"))
        raise Refused(f"the kernel has no {op}")

    def _sigmoid(self, x: str) -> str:
        """What SiLU multiplies by; NaN stays: by itself in floats, where integers set the exponent it is put back."""
        self.count += 1
        n = f"s{self.count}"
        lines, value = sigmoid(x[1:], n, self.estimate)
        self.lines += lines.splitlines()
        if self.estimate:
            return value
        odd = self.named(f"fcmp uno {FLOATS} {x}, {x}")
        return self.named(f"select {_BITS} {odd}, {FLOATS} {x}, {FLOATS} {value}")


def woven(parts: Sequence[list[str]]) -> list[str]:
    """The statements of all parts in turns, each behind those that it needs: what waits for a result of its own part lets the others go on. A CPU
    looks ahead some hundred instructions, which hold four chains of a sigmoid at most."""
    waiting = {line.split(" = ")[0].strip() for part in parts for line in part if " = " in line}  # names of values that are still to come
    at, found = [0] * len(parts), []
    while any(n < len(part) for n, part in zip(at, parts, strict=True)):
        for k, part in enumerate(parts):
            if at[k] == len(part):
                continue
            made, _, used = part[at[k]].rpartition(" = ")
            if waiting.isdisjoint(_VALUE.findall(used)):
                found.append(part[at[k]])
                waiting.discard(made.strip())
                at[k] += 1
    return found


def _mask(lanes: Lanes) -> str:
    return f"<{', '.join(f'i1 {int(i in lanes)}' for i in range(WIDE))}>"

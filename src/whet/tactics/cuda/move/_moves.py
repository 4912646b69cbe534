"""C text for the expression tree of a layer of moves and arithmetic: statements for elements of the result, the STEPS of moves.cu.

A Concat is a branch of the tree; nodes that all its branches need are computed before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from whet.network import Layer
from whet.tactics._fused import EpilogueStep
from whet.tactics._moves_indices import ROW, Place
from whet.tactics._moves_tree import Moves, Node, Refused, compute_height, list_children, list_unconditional_nodes
from whet.tactics.cuda._device.kernel import ACTIVATIONS, find_activation
from whet.tactics.cuda.elementwise.elementwise import BINARY, UNARY, format_number

_LONGEST = 60_000  # characters of generated code: beyond, compiling takes longer than it can gain


class MovesCode:
    """The code of a fused layer, its constants, and the sources by their places among the inputs. Raises Refused.

    `formats` gives the format of each run-time input by its place, `out` that of the result: row-major, or channels last ("nhwc").
    Elements are at `at`, or with `rows` at `column` of `row`, so that values that depend on the row alone are computed once. With `together`
    they are computed once for that many rows, from a row index that is a multiple of it on; Refused if the rows can differ.
    """

    def __init__(self, layer: Layer, formats: dict[int, str], out: str, rows: bool = False, together: int = 1) -> None:
        tree = Moves(layer, formats, out, as_one=not rows)
        self.sources, self.numbers, self.row = tree.sources, tree.numbers, tree.columns if rows else 0
        writer = _Writer(rows, together > 1)
        self.text = writer.emit_all(tree.root, {})
        if together > 1 and (tree.rows % together or not all(_is_uniform(*c, together) for c in writer.asked)):
            raise Refused(f"{together} consecutive rows are not all computed alike")
        if len(self.text) > _LONGEST:
            raise Refused(f"{len(self.text)} characters of code for one element")


def describe_moves(make_code: Callable[[], MovesCode]) -> MovesCode | str:
    """The code, or why there is none."""
    try:
        return make_code()
    except Refused as e:
        return str(e)


def _is_uniform(place: Place, limits: Sequence[int], together: int) -> bool:
    """True if the rows of each group of `together` are on the same side of all limits: all changes are at multiples of it."""
    inner, period = 1, 0
    for how in ("mod", "div"):
        atom = place.terms[0][0] if place.terms else ROW
        if place == Place.of(atom) and atom[0] == how:
            place = atom[1]
            inner, period = (atom[2], period) if how == "div" else (inner, atom[2])
    return place == Place.of(ROW) and not any(inner * change % together for change in (*limits[:-1], period))


class _Writer:
    """Nodes as statements for EACH elements i at once: each node is a variable in the innermost block that contains all its readers.

    A branch that all elements of a row take encloses them all, so that their loads overlap; within other branches
    elements are computed one by one. EVERY(code) of moves.cu runs code for each. With `early`, the loads of single elements' branches are issued
    before all arithmetic: otherwise each element waits for its own loads.
    """

    def __init__(self, rows: bool, early: bool = False) -> None:
        self.rows, self.early, self.count = rows, early, 0
        self.asked: list[tuple[Place, tuple[int, ...]]] = []  # choices that all elements make alike

    def emit_all(self, root: Node, known: dict[Node, str]) -> str:
        """Statements that set all `values[i]` to `root`; `known` are the variables of the blocks around."""
        if root[0] != "choice":
            text, name = self.value(root, known, many=True)
            return f"{text}EVERY(values[i] = {name};) "
        alike = self.rows and not root[1].by_column
        first, known = self._loads(root, known) if self.early and not alike else ("", known)
        text, known = self._emit_shared_nodes(root, known, many=True)
        text = first + text
        if alike:
            self.asked.append((root[1], root[2]))
            return text + self._emit_branches(root, lambda part: self.emit_all(part, dict(known)))
        return f"{text}EVERY(float value; {self.block(root, known)}values[i] = value;) "

    def block(self, root: Node, known: dict[Node, str]) -> str:
        """Statements that set `value` to `root`, of one element."""
        if root[0] != "choice":
            text, name = self.value(root, known)
            return f"{text}value = {name}; "
        text, known = self._emit_shared_nodes(root, known)
        return text + self._emit_branches(root, lambda part: self.block(part, dict(known)))

    def _loads(self, root: Node, known: dict[Node, str]) -> tuple[str, dict[Node, str]]:
        """The loads of some branches only, each in its branch; constants of several branches share one load."""
        _, where, limits, parts = root
        everywhere = set.intersection(*(list_unconditional_nodes(p) for p in parts))
        taken: dict[Node, list[int]] = {}
        for k, part in enumerate(parts):
            for node in sorted(
                (n for n in list_unconditional_nodes(part) - everywhere - set(known) if n[0] in ("constant", "source")), key=_emit_leaf
            ):
                taken.setdefault(node, []).append(k)
        together: list[list[Node]] = []
        for node, ks in taken.items():
            free = (g for g in together if all(n[0] == "constant" == node[0] and not set(ks) & set(taken[n]) for n in g))
            group = next(free, None)
            if group is None:
                together.append([node])
            else:
                group.append(node)
        text, known, at = "", dict(known), place_text(where)

        def test(node: Node) -> str:
            found = []
            for k in taken[node]:
                both = [f"{at} >= {limits[k - 1]}u"] * (k > 0) + [f"{at} < {limits[k]}u"] * (k + 1 < len(parts))
                found.append(f"({' && '.join(both) or 'true'})")
            return " || ".join(found)

        for group in together:
            self.count += 1
            name = f"v{self.count}[i]"
            known |= dict.fromkeys(group, name)
            code = _emit_leaf(group[0])
            if len(group) > 1:
                chosen = "".join(f"{test(n)} ? {place_text(n[2].plus(n[1]))} : " for n in group[:-1])
                code = f"p.constants[{chosen}{place_text(group[-1][2].plus(group[-1][1]))}]"
            text += f"float v{self.count}[EACH]; EVERY({name} = 0.f; if ({' || '.join(map(test, group))}) {name} = {code};) "
        return text, known

    def _emit_shared_nodes(self, root: Node, known: dict[Node, str], many: bool = False) -> tuple[str, dict[Node, str]]:
        """Nodes that all branches of a choice need, with their variables."""
        shared = set.intersection(*(list_unconditional_nodes(p) for p in root[3]))
        text, known = "", dict(known)
        for node in sorted((n for n in shared if n[0] != "choice"), key=lambda n: (compute_height(n), _format_sort_key(n))):
            text += self.value(node, known, many)[0]
        return text, known

    def _emit_branches(self, root: Node, make_text: Callable[[Node], str]) -> str:
        _, where, limits, parts = root
        text = ""
        for k, (limit, part) in enumerate(zip(limits, parts, strict=True)):
            head = "" if k == 0 else "else "
            test = f"if ({place_text(where)} < {limit}u) " if k + 1 < len(parts) else ""
            text += f"{head}{test}{{ {make_text(part)}}} "
        return text

    def value(self, node: Node, known: dict[Node, str], many: bool = False) -> tuple[str, str]:
        """(statements, the variable) of one element, or of `many`; adds to `known`."""
        if node[0] == "number":
            return "", format_number(node[1])
        if node in known:
            return "", known[node]
        self.count += 1
        name = f"v{self.count}"
        target, text = f"{name}[i]" if many else name, ""
        if node[0] in ("constant", "source"):
            code = f"{target} = {_emit_leaf(node)};"
        elif node[0] == "choice":
            code = f"float value; {self.block(node, dict(known))}{target} = value;"
        else:
            names, (expression, operands) = [], _emit_step(node)
            for part in operands:
                more, made = self.value(part, known, many)
                text += more
                names.append(made)
            given = "".join(f"const float {letter} = {made}; " for letter, made in zip("ab", names, strict=False))
            code = f"{given}{target} = {expression};"
        text += f"float {name}[EACH]; EVERY({code}) " if many else f"float {name}; {{ {code} }} "
        known[node] = target
        return text, target


def _emit_step(node: Node) -> tuple[str, tuple[Node, ...]]:
    """The expression of a step, over a and b, and these. Raises Refused."""
    _, op, operands, attrs = node
    if op == "Pow" and operands[1] == ("number", 2.0):
        return "a * a", operands[:1]
    if op in BINARY and len(operands) == 2:
        return BINARY[op], operands
    if op in UNARY:
        return UNARY[op], operands
    act = find_activation(EpilogueStep(op, dict(attrs)))
    if act is None:
        raise Refused(f"the kernel has no {op} of {len(operands)} operands")
    return f"activate<{ACTIVATIONS[act[0]]}>(a, Act{{{format_number(act[1])}, {format_number(act[2])}}})", operands


def _emit_leaf(node: Node) -> str:
    """The code of a leaf."""
    if node[0] == "source":
        return f"source({node[1]}, {place_text(node[2])})"
    return f"p.constants[{place_text(node[2].plus(node[1]))}]"


def _format_sort_key(node: Node) -> str:
    """A sort key for nodes of one height, the same in every process."""
    return _emit_leaf(node) if node[0] in ("constant", "source") else f"{node[1]} {[_format_sort_key(p) for p in list_children(node)]}"


@functools.cache
def place_text(place: Place) -> str:
    """An index as C text of u32: unsigned arithmetic wraps, so a negative part is correct if the sum is not negative."""
    texts = []
    for atom, n in place.terms:
        text = atom[0] if len(atom) == 1 else f"({place_text(atom[1])} {'/' if atom[0] == 'div' else '%'} {atom[2]}u)"
        texts.append(text if n == 1 else f"{text} * {n}u")
    total = " + ".join(texts)
    if place.offset or not texts:
        total += f"{' + ' if place.offset > 0 else ' - '}{abs(place.offset)}u" if texts else f"{place.offset}u"
    return total if len(texts) + bool(place.offset) < 2 and "*" not in total else f"({total})"

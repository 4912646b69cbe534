"""Code for layers that move numbers and compute with them: each element of the result, followed back to what it is made of.

A tensor's element is a tree of loads and arithmetic whose leaves know their place: an index into a source or a constant, as C text made of
the element's own place. Where parts are joined the tree has a choice; what all its branches need stands in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape, stored_shape
from whet.tactics._fused import Post
from whet.tactics.cuda._kernel import ACTIVATIONS, activation_of
from whet.tactics.cuda.own_pointwise import BINARY, UNARY, number_text

Index = tuple[str, int]
"""A place along an axis: text, and a number that is added to it."""
Node = tuple
"""("number", text), ("source", which, place), ("constant", first, place), ("step", expression over a and b, node, ...) or
("choice", text, limits, nodes)."""
_LONGEST = 60_000  # characters of generated code: beyond, compiling takes longer than it can gain


class Refused(Exception):
    """The layer has something in it that has no code."""


class Moves:
    """The code of a fused layer, its constants, and the sources by their places among the inputs. Raises Refused.

    `formats` gives the format of each run-time input by its place, `out` that of the result: row-major, or channels last ("nhwc").
    Elements are at `at`, or with `rows` at `column` of `row`, so that what depends on the row alone is asked and reckoned once. With `together`
    that many rows at a time, the first one's number a multiple of it, are asked once for all; Refused where their answers can differ.
    """

    def __init__(self, layer: Layer, formats: dict[int, str], out: str, rows: bool = False, together: int = 1) -> None:
        self.layer, self.body, self.formats = layer, layer.regions["body"], formats
        self.sources = sorted(formats)
        self.outer = {t: i for i, t in enumerate(self.body.inputs)}
        self.constants: list[np.ndarray] = []
        self._length = 0
        self._nodes: dict[tuple[Tensor, tuple[Index, ...]], Node] = {}
        shape = static_shape(layer.outputs[0].shape)
        self.row = static_shape(stored_shape(out, shape))[-1] if rows else 0
        root = self._node(self.body.outputs[0], _stored_place(shape, out, rows))
        writer = _Writer(rows, together > 1)
        self.text = writer.all(root, {})
        if together > 1 and (prod(shape) // self.row % together or not all(_alike(*c, together) for c in writer.asked)):
            raise Refused(f"{together} rows behind each other are not all made alike")
        if len(self.text) > _LONGEST:
            raise Refused(f"{len(self.text)} characters of code for an element")

    @property
    def numbers(self) -> np.ndarray:
        """All constants behind each other, at least one."""
        return np.concatenate([*self.constants, np.zeros(1, np.float32)])

    def _node(self, t: Tensor, at: tuple[Index, ...]) -> Node:
        key = (t, at)
        if key not in self._nodes:
            self._nodes[key] = self._made(t, at)
        return self._nodes[key]

    def _made(self, t: Tensor, at: tuple[Index, ...]) -> Node:
        if t in self.outer:
            return self._leaf(self.layer.inputs[self.outer[t]], self.outer[t], at)
        if t.weight is not None:
            return self._leaf(t, -1, at)
        layer = t.maker
        if layer is None:
            raise Refused(f"%{t.name} comes from nowhere")
        shape, x = static_shape(t.shape), layer.needs(0)
        if layer.op == "Reshape":
            return self._node(x, _regrouped(at, shape, static_shape(x.shape)))
        if layer.op == "Transpose":
            perm = layer.attrs["perm"]
            return self._node(x, tuple(at[perm.index(i)] for i in range(len(perm))))
        if layer.op == "Split":
            axis = int(layer.attrs["axis"]) % len(shape)
            before = sum(static_shape(o.shape)[axis] for o in layer.outputs[: [o is t for o in layer.outputs].index(True)])
            return self._node(x, _shifted(at, axis, before))
        if layer.op == "Slice":
            starts, _, axes = (self._constant(i).reshape(-1) for i in layer.inputs[1:4])
            if layer.input(4) is not None or starts.min() < 0:
                raise Refused("a Slice with steps, or from the end")
            for axis, start in zip(axes.tolist(), starts.tolist(), strict=True):
                at = _shifted(at, axis % len(shape), start)
            return self._node(x, at)
        if layer.op == "Concat":
            axis, start = int(layer.attrs["axis"]) % len(shape), 0
            limits, parts = [], []
            for part in layer.inputs:
                assert part is not None
                parts.append(self._node(part, _shifted(at, axis, -start)))
                start += static_shape(part.shape)[axis]
                limits.append(start)
            return ("choice", _written(at[axis]), tuple(limits), tuple(parts))
        return self._step(layer, at)

    def _step(self, layer: Layer, at: tuple[Index, ...]) -> Node:
        if layer.op in BINARY:
            a, b = (self._node(i, _spread(at, i)) for i in layer.inputs)
            if layer.op == "Pow" and b == ("number", number_text(2.0)):
                return ("step", "a * a", a)
            return ("step", BINARY[layer.op], a, b)
        bounds = {f"input{i}": self._constant(t) for i, t in enumerate(layer.inputs) if i and t is not None}
        x = self._node(layer.inputs[0], at)
        if layer.op in UNARY:
            return ("step", UNARY[layer.op], x)
        act = activation_of(Post(layer.op, {**layer.attrs, **bounds}))
        if act is None:
            raise Refused(f"the kernel has no {layer.op}")
        return ("step", f"activate<{ACTIVATIONS[act[0]]}>(a, Act{{{number_text(act[1])}, {number_text(act[2])}}})", x)

    def _constant(self, t: Tensor) -> np.ndarray:
        value = self.layer.inputs[self.outer[t]] if t in self.outer else t
        if value is None or not value.is_constant:
            raise Refused(f"%{t.name} is computed at run time")
        return value.array()

    def _leaf(self, t: Tensor | None, where: int, at: tuple[Index, ...]) -> Node:
        assert t is not None
        shape = static_shape(t.shape)
        if not t.is_constant:
            return ("source", self.sources.index(where), _place(at, shape, self.formats[where]))
        values = np.asarray(t.array(), np.float32)
        if values.size == 1:
            return ("number", number_text(float(values.reshape(-1)[0])))
        flat = values.reshape(-1)
        first = self._length
        for known, begin in self._held():
            if known is flat or (known.shape == flat.shape and np.array_equal(known, flat)):
                first = begin
                break
        else:
            self.constants.append(flat)
            self._length += flat.size
        return ("constant", first, _place(at, shape, "linear"))

    def _held(self) -> list[tuple[np.ndarray, int]]:
        found, at = [], 0
        for a in self.constants:
            found.append((a, at))
            at += a.size
        return found


def _written(i: Index) -> str:
    text, offset = i
    return text if not offset else f"({text} {'+' if offset > 0 else '-'} {abs(offset)}u)"


def _shifted(at: tuple[Index, ...], axis: int, by: int) -> tuple[Index, ...]:
    return (*at[:axis], (at[axis][0], at[axis][1] + by), *at[axis + 1 :])


def _spread(at: tuple[Index, ...], t: Tensor) -> tuple[Index, ...]:
    """The place in an operand that broadcasts."""
    shape = static_shape(t.shape)
    behind = at[len(at) - len(shape) :]
    return tuple(("0u", 0) if d == 1 else i for d, i in zip(shape, behind, strict=True))


def _place(at: Sequence[Index], shape: Sequence[int], fmt: str) -> str:
    """Where an element lies in memory, in elements."""
    order = list(zip(at, shape, strict=True))
    if fmt == "nhwc":
        order = [order[0], *order[2:], order[1]]
    text = ""
    for i, d in _joined([(i, d) for i, d in order if d != 1]):
        text = _written(i) if not text else f"({text} * {d}u + {_written(i)})"
    return text or "0u"


def _joined(order: list[tuple[Index, int]]) -> list[tuple[Index, int]]:
    """Axes behind each other whose places were cut from the same place (`_cut`) as one, whose place is then that one: no divisions."""
    found: list[tuple[Index, int]] = []
    for (text, offset), d in reversed(order):
        if found and offset == 0:
            (inner, behind), size = found[-1]
            whole = inner.removeprefix("(").removesuffix(f" % {size}u)")
            if behind == 0 and inner == f"({whole} % {size}u)" and text in (f"({whole} / {size}u)", f"(({whole} / {size}u) % {d}u)"):
                found[-1] = ((whole if text == f"({whole} / {size}u)" else f"({whole} % {d * size}u)"), 0), d * size
                continue
        found.append(((text, offset), d))
    return found[::-1]


def _order(rank: int, fmt: str) -> list[int]:
    return [0, *range(2, rank), 1] if fmt == "nhwc" else list(range(rank))


def _stored_place(shape: Sequence[int], fmt: str, rows: bool) -> tuple[Index, ...]:
    """The place along each axis of the element that lies at `at`, or at `column` of `row`."""
    sizes = static_shape(stored_shape(fmt, shape))
    places = [*_cut("row", sizes[:-1]), ("column", 0)] if rows else _cut("at", sizes)
    found = dict(zip(_order(len(shape), fmt), places, strict=True))
    return tuple(found[i] for i in range(len(shape)))


def _cut(flat: str, shape: Sequence[int]) -> list[Index]:
    """Places along the axes of a block of this shape, from the place in it."""
    found: list[Index] = []
    wide = [d for d in shape if d != 1]
    for k, d in enumerate(shape):
        inner = prod(shape[k + 1 :])
        if d == 1:
            found.append(("0u", 0))
            continue
        text = flat if inner == 1 else f"({flat} / {inner}u)"
        first = not wide or prod(shape[:k]) == 1
        found.append((text if first else f"({text} % {d}u)", 0))
    return found


def _regrouped(at: tuple[Index, ...], after: Sequence[int], before: Sequence[int]) -> tuple[Index, ...]:
    """Places in the shape before a Reshape; axes that it leaves as they are stay what they were."""
    found: list[Index] = []
    i = j = 0
    while i < len(after) or j < len(before):
        a, b = i, j
        left = right = 1
        while True:
            if left == right and (i > a or j > b):
                break
            if (left <= right and i < len(after)) or j == len(before):
                left *= after[i]
                i += 1
            else:
                right *= before[j]
                j += 1
        while i < len(after) and after[i] == 1:
            i += 1
        while j < len(before) and before[j] == 1:
            j += 1
        wide, narrow = [k for k in range(a, i) if after[k] != 1], [k for k in range(b, j) if before[k] != 1]
        if [after[k] for k in wide] == [before[k] for k in narrow]:
            same = dict(zip(narrow, (at[k] for k in wide), strict=True))
            found += [same.get(k, ("0u", 0)) for k in range(b, j)]
        else:
            found += _cut(_place(at[a:i], after[a:i], "linear"), before[b:j])
    return tuple(found)


def _alike(text: str, limits: Sequence[int], together: int) -> bool:
    """Whether the rows of each group of `together` are on the same side of all limits: all changes are at multiples of it."""
    found = re.fullmatch(r"\(*row(?: / (\d+)u\))?(?: % (\d+)u\))?", text)
    if found is None:
        return False
    inner, period = int(found[1] or 1), int(found[2] or 0)
    return not any(inner * place % together for place in (*limits[:-1], period))


class _Writer:
    """Nodes as statements for EACH elements i at once: each node is a variable of its own in the innermost block that holds all who read it.

    A choice that all elements of a row make alike stands around them all, so that loads of several are on their way together; from another
    one on, elements go one by one. EVERY(code) of moves.cu runs code for each. With `early`, what single elements' branches load is asked
    for in front of all arithmetic: else each element waits for its own.
    """

    def __init__(self, rows: bool, early: bool = False) -> None:
        self.rows, self.early, self.count = rows, early, 0
        self.asked: list[tuple[str, tuple[int, ...]]] = []  # choices that all elements make alike

    def all(self, root: Node, known: dict[Node, str]) -> str:
        """Statements that set all `values[i]` to `root`; `known` are the variables of the blocks around."""
        if root[0] != "choice":
            text, name = self.value(root, known, many=True)
            return f"{text}EVERY(values[i] = {name};) "
        alike = self.rows and "column" not in root[1]
        first, known = self._loads(root, known) if self.early and not alike else ("", known)
        text, known = self._shared(root, known, many=True)
        text = first + text
        if alike:
            self.asked.append((root[1], root[2]))
            return text + self._branches(root, lambda part: self.all(part, dict(known)))
        return f"{text}EVERY(float value; {self.block(root, known)}values[i] = value;) "

    def block(self, root: Node, known: dict[Node, str]) -> str:
        """Statements that set `value` to `root`, of one element."""
        if root[0] != "choice":
            text, name = self.value(root, known)
            return f"{text}value = {name}; "
        text, known = self._shared(root, known)
        return text + self._branches(root, lambda part: self.block(part, dict(known)))

    def _loads(self, root: Node, known: dict[Node, str]) -> tuple[str, dict[Node, str]]:
        """What branches load that not all need, each where its branch is taken: of constants, one load serves one of each branch."""
        _, where, limits, parts = root
        everywhere = set.intersection(*(_inside(p) for p in parts))
        taken: dict[Node, list[int]] = {}
        for k, part in enumerate(parts):
            for node in sorted((n for n in _inside(part) - everywhere - set(known) if n[0] in ("constant", "source")), key=str):
                taken.setdefault(node, []).append(k)
        together: list[list[Node]] = []
        for node, ks in taken.items():
            free = (g for g in together if all(n[0] == "constant" == node[0] and not set(ks) & set(taken[n]) for n in g))
            group = next(free, None)
            if group is None:
                together.append([node])
            else:
                group.append(node)
        text, known = "", dict(known)

        def test(node: Node) -> str:
            found = []
            for k in taken[node]:
                both = [f"{where} >= {limits[k - 1]}u"] * (k > 0) + [f"{where} < {limits[k]}u"] * (k + 1 < len(parts))
                found.append(f"({' && '.join(both) or 'true'})")
            return " || ".join(found)

        for group in together:
            self.count += 1
            name = f"v{self.count}[i]"
            known |= dict.fromkeys(group, name)
            code = _loaded(group[0])
            if len(group) > 1:
                chosen = "".join(f"{test(n)} ? {n[1]}u + {n[2]} : " for n in group[:-1])
                code = f"p.constants[{chosen}{group[-1][1]}u + {group[-1][2]}]"
            text += f"float v{self.count}[EACH]; EVERY({name} = 0.f; if ({' || '.join(map(test, group))}) {name} = {code};) "
        return text, known

    def _shared(self, root: Node, known: dict[Node, str], many: bool = False) -> tuple[str, dict[Node, str]]:
        """What all branches of a choice need, and the variables with it."""
        shared = set.intersection(*(_inside(p) for p in root[3]))
        text, known = "", dict(known)
        for node in sorted((n for n in shared if n[0] != "choice"), key=_height):
            text += self.value(node, known, many)[0]
        return text, known

    def _branches(self, root: Node, made: Callable[[Node], str]) -> str:
        _, where, limits, parts = root
        text = ""
        for k, (limit, part) in enumerate(zip(limits, parts, strict=True)):
            head = "" if k == 0 else "else "
            test = f"if ({where} < {limit}u) " if k + 1 < len(parts) else ""
            text += f"{head}{test}{{ {made(part)}}} "
        return text

    def value(self, node: Node, known: dict[Node, str], many: bool = False) -> tuple[str, str]:
        """(statements, the variable) of one element, or of `many`; adds to `known`."""
        if node[0] == "number":
            return "", node[1]
        if node in known:
            return "", known[node]
        self.count += 1
        name = f"v{self.count}"
        target, text = f"{name}[i]" if many else name, ""
        if node[0] in ("constant", "source"):
            code = f"{target} = {_loaded(node)};"
        elif node[0] == "choice":
            code = f"float value; {self.block(node, dict(known))}{target} = value;"
        else:
            names = []
            for part in node[2:]:
                more, made = self.value(part, known, many)
                text += more
                names.append(made)
            given = "".join(f"const float {letter} = {made}; " for letter, made in zip("ab", names, strict=False))
            code = f"{given}{target} = {node[1]};"
        text += f"float {name}[EACH]; EVERY({code}) " if many else f"float {name}; {{ {code} }} "
        known[node] = target
        return text, target


def _loaded(node: Node) -> str:
    """The code of a leaf."""
    return f"source({node[1]}, {node[2]})" if node[0] == "source" else f"p.constants[{node[1]}u + {node[2]}]"


def _inside(node: Node) -> set[Node]:
    """A node and all below it that is needed whatever its choices are."""
    if node[0] == "choice":
        return {node} | set.intersection(*(_inside(p) for p in node[3]))
    return {node}.union(*(_inside(p) for p in node[2:])) if node[0] == "step" else {node}


def _height(node: Node) -> int:
    return 1 + max((_height(p) for p in node[2:]), default=0) if node[0] == "step" else 0


def described(made: Callable[[], Moves]) -> Moves | str:
    """The code, or why there is none."""
    try:
        return made()
    except Refused as e:
        return str(e)

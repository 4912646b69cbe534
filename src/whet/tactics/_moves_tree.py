"""The composite Moves (Reshape, Transpose, Split, Slice, Concat and arithmetic) as an expression tree for each element of the result.

The body is followed from the result back to its sources: loads, constants, arithmetic, and choices between the inputs of a Concat.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from whet.network import Layer, Tensor, compute_stored_shape, static_shape
from whet.ops._strided import RESHAPES
from whet.ops.slice import slice_ranges
from whet.tactics._moves_indices import (
    COLUMN,
    FLAT,
    ROW,
    Atom,
    Place,
    Refused,
    broadcast_index,
    compute_flat_offset,
    order,
    regroup_indices,
    shift_index,
    unflatten,
)

Node = tuple
"""("number", value), ("source", which, place), ("blocked", which, place, channel, length of a block, its channels), ("constant", first, place),
("step", op, nodes, attributes) or ("choice", place, limits, nodes)."""
BLOCKS = {"nChw8c": 8, "nChw16c": 16}  # channels per block of a format
_OPERANDS = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")  # all inputs are operands; of other operations the inputs after the first are bounds


class Moves:
    """The tree of a fused layer (`root`), its constants, and the sources by input index. Raises Refused.

    `formats` has the format of each run-time input by index: row-major, channels-last ("nhwc") or whole blocks (of BLOCKS); `out` is that of the
    result: row-major or channels-last. `pitches` has the elements between pixels of channels-last inputs where pixels are padded. Elements of the
    result are addressed by ROW and COLUMN, of which there are `rows` and `columns`; with `as_one` by a FLAT index.
    """

    def __init__(
        self, layer: Layer, formats: dict[int, str], out: str, as_one: bool = False, pitches: Mapping[int, int] | None = None
    ) -> None:  # fmt: skip
        self.layer, self.body, self.formats, self.pitches = layer, layer.regions["body"], formats, pitches or {}
        self.sources = sorted(formats)
        self.outer = {t: i for i, t in enumerate(self.body.inputs)}
        self._held: list[tuple[np.ndarray, int]] = []
        self._nodes: dict[tuple[Tensor, tuple[Place, ...]], Node] = {}
        shape = static_shape(layer.outputs[0].shape)
        sizes = static_shape(compute_stored_shape(out, shape))
        self.rows, self.columns = prod(sizes[:-1]), sizes[-1]
        places = unflatten(Place.of(FLAT), sizes) if as_one else [*unflatten(Place.of(ROW), sizes[:-1]), Place.of(COLUMN)]
        found = dict(zip(order(len(shape), out), places, strict=True))
        self.root = self._build_node(self.body.outputs[0], tuple(found[i] for i in range(len(shape))))

    @property
    def numbers(self) -> np.ndarray:
        """All constants concatenated (f32), at least one element."""
        return np.concatenate([*(a for a, _ in self._held), np.zeros(1, np.float32)])

    def _build_node(self, t: Tensor, at: tuple[Place, ...]) -> Node:
        key = (t, at)
        if key not in self._nodes:
            self._nodes[key] = self._build_layer(t, at)
        return self._nodes[key]

    def _build_layer(self, t: Tensor, at: tuple[Place, ...]) -> Node:
        if t in self.outer:
            return self._build_leaf(self.layer.needs(self.outer[t]), self.outer[t], at)
        if t.weight is not None:
            return self._build_leaf(t, -1, at)
        layer = t.maker
        if layer is None:
            raise Refused(f"%{t.name} has no producer")
        shape, x = static_shape(t.shape), layer.needs(0)
        if layer.op in RESHAPES:
            return self._build_node(x, regroup_indices(at, shape, static_shape(x.shape)))
        if layer.op == "Transpose":
            perm = layer.attrs["perm"]
            return self._build_node(x, tuple(at[perm.index(i)] for i in range(len(perm))))
        if layer.op == "Split":
            axis = int(layer.attrs["axis"]) % len(shape)
            before = sum(static_shape(o.shape)[axis] for o in layer.outputs[: [o is t for o in layer.outputs].index(True)])
            return self._build_node(x, shift_index(at, axis, before))
        if layer.op == "Slice" and len(layer.inputs) == 1:
            for axis, (begin, _, step) in slice_ranges(layer).items():
                if step < 1 or not isinstance(begin, int):
                    raise Refused("a Slice backwards, or from a place that is not known")
                at = (*at[:axis], at[axis].times(step).plus(begin), *at[axis + 1 :])
            return self._build_node(x, at)
        if layer.op == "Gather":
            axis = int(layer.attrs["axis"]) % x.type.rank
            index = int(self._build_constant(layer.needs(1))[0]) % static_shape(x.shape)[axis]
            return self._build_node(x, (*at[:axis], Place(index), *at[axis:]))
        if layer.op == "Slice":
            starts, _, along = (self._build_constant(layer.needs(i)) for i in (1, 2, 3))
            if layer.input(4) is not None or starts.min() < 0:
                raise Refused("a Slice with steps, or from the end")
            for axis, start in zip(along.tolist(), starts.tolist(), strict=True):
                at = shift_index(at, axis % len(shape), start)
            return self._build_node(x, at)
        if layer.op == "Concat":
            return self._join(layer, at, int(layer.attrs["axis"]) % len(shape))
        return self._build_step(layer, at)

    def _join(self, layer: Layer, at: tuple[Place, ...], axis: int) -> Node:
        limits, parts, start = [], [], 0
        for i in range(len(layer.inputs)):
            part = layer.needs(i)
            parts.append(self._build_node(part, shift_index(at, axis, -start)))
            start += static_shape(part.shape)[axis]
            limits.append(start)
        return ("choice", at[axis], tuple(limits), tuple(parts))

    def _build_step(self, layer: Layer, at: tuple[Place, ...]) -> Node:
        count = len(layer.inputs) if layer.op in _OPERANDS else 1
        nodes = tuple(self._build_node(x, broadcast_index(at, static_shape(x.shape))) for x in map(layer.needs, range(count)))
        bounds = {f"input{i}": float(self._build_constant(t)[0]) for i, t in enumerate(layer.inputs) if i >= count and t is not None}
        return ("step", layer.op, nodes, tuple(sorted({**layer.attrs, **bounds}.items())))

    def _build_constant(self, t: Tensor) -> np.ndarray:
        value = self.layer.inputs[self.outer[t]] if t in self.outer else t
        if value is None or not value.is_constant:
            raise Refused(f"%{t.name} is computed at run time")
        return value.array().reshape(-1)

    def _build_leaf(self, t: Tensor, where: int, at: tuple[Place, ...]) -> Node:
        shape = static_shape(t.shape)
        if not t.is_constant and (block := BLOCKS.get(self.formats[where])):
            pixels = prod(shape[2:])
            image = at[0].times(shape[1] * pixels) if shape[0] != 1 else Place()
            place = image.plus(compute_flat_offset(at[2:], shape[2:], "linear").times(block))
            return ("blocked", self.sources.index(where), place, at[1], pixels * block, block)
        if not t.is_constant and where in self.pitches:
            pixel = compute_flat_offset((at[0], *at[2:]), (shape[0], *shape[2:]), "linear")
            return ("source", self.sources.index(where), pixel.times(self.pitches[where]).plus(at[1] if shape[1] != 1 else Place()))
        if not t.is_constant:
            return ("source", self.sources.index(where), compute_flat_offset(at, shape, self.formats[where]))
        values = np.asarray(t.array(), np.float32).reshape(-1)
        if values.size == 1:
            return ("number", float(values[0]))
        first = next((begin for known, begin in self._held if np.array_equal(known, values)), None)
        if first is None:
            first = sum(a.size for a, _ in self._held)
            self._held.append((values, first))
        return ("constant", first, compute_flat_offset(at, shape, "linear"))


def list_children(node: Node) -> tuple[Node, ...]:
    """The children of a node: operands of a step, parts of a choice."""
    return node[2] if node[0] == "step" else node[3] if node[0] == "choice" else ()


def list_choices(node: Node) -> list[Node]:
    """All choices in a tree, outermost first."""
    return [node] * (node[0] == "choice") + [c for part in list_children(node) for c in list_choices(part)]


def replace_node(node: Node, old: Node, new: Node) -> Node:
    """The tree with `new` substituted for `old`."""
    if node == old:
        return new
    parts = tuple(replace_node(p, old, new) for p in list_children(node))
    return (*node[:2], parts, node[3]) if node[0] == "step" else (*node[:3], parts) if node[0] == "choice" else node


def fix_atom(node: Node, atom: Atom, value: int) -> Node:
    """The tree with an atom fixed to `value`."""
    known = tuple(part.fix(atom, value) if isinstance(part, Place) else part for part in node)
    parts = tuple(fix_atom(p, atom, value) for p in list_children(node))
    return (*known[:2], parts, known[3]) if node[0] == "step" else (*known[:3], parts) if node[0] == "choice" else known


def list_blocked_loads(node: Node) -> list[Node]:
    """All loads from blocked sources in a tree."""
    return [node] * (node[0] == "blocked") + [b for part in list_children(node) for b in list_blocked_loads(part)]


def list_unconditional_nodes(node: Node) -> set[Node]:
    """The nodes of a tree that are evaluated whichever parts its choices select."""
    nodes = [list_unconditional_nodes(part) for part in list_children(node)]
    return {node} | (set.intersection(*nodes) if node[0] == "choice" else set().union(*nodes))


def compute_height(node: Node) -> int:
    """The number of steps on the longest path below a node."""
    return 1 + max((compute_height(p) for p in list_children(node)), default=0) if node[0] == "step" else 0

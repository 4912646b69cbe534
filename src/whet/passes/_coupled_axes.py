"""Groups of axes that hold the same entries in several tensors, from the ops' couples, and the layout of the axes after padding.

Axes that may be cut together (ops' `couples`) may also be padded together: padding with zero weights is the inverse of a cut. Two conditions are
added. A sum over padded entries needs constant weights, which are zero there; a product of two computed tensors has none. And values in padded
entries must be finite, because zero times infinity is not zero: only ops in `FINITE` are analysed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.network import F32, Layer, Network, Tensor, TensorType
from whet.ops import Couple, get_op

Node = tuple[Tensor, int]
"""An axis of a tensor, of static size two or more."""

FINITE = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "ConvTranspose", "DequantizeLinear", "Elu", "Erf",
    "Flatten", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "MatMul", "Max",
    "MaxPool", "Min", "Mish", "Mul", "Neg", "PRelu", "Pad", "QuantizeLinear", "Relu", "Reshape", "Resize", "Selu", "Sigmoid", "Slice", "Softplus",
    "Softsign", "Split", "Squeeze", "Sub", "Swish", "Tanh", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Ops that compute small finite values from small finite values."""

_ASSUMED_SIZE = 64  # of an axis with a symbolic size, for estimates of work; the first axis, the batch, counts as 1


@dataclass(frozen=True)
class Dense:
    """A layer that sums over the axis `read` with constant weights, with output channels `made`, in `work` multiplications. None: an axis of symbolic
    size."""

    layer: Layer
    read: Node | None
    made: Node | None
    work: int


@dataclass
class CoupledAxes:
    """Groups of coupled axes of a network, as a union-find structure: coupled nodes have the same `root`."""

    net: Network
    dense: list[Dense] = field(default_factory=list)
    locked: dict[Node, str] = field(default_factory=dict)  # root -> why it must not be padded
    parts_of: dict[Node, tuple[tuple[Node, int], ...]] = field(default_factory=dict)
    """Root -> (root of a part, entries of this axis per entry of the part), in order: a Concat's axis consists of its inputs' axes."""
    gaps: set[Node] = field(default_factory=set)
    """Parts that no other tensor has: a Pad's padding, entries that a Slice drops."""
    _up: dict[Node, Node] = field(default_factory=dict)
    _relations: list[tuple[Node, tuple[tuple[Node, int], ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scales = {t for x in self.net.layers if x.op in ("QuantizeLinear", "DequantizeLinear") for t in x.inputs[1:2] if t is not None}
        own = {t for x in self.net.layers for t in x.outputs}
        for layer in self.net.layers:
            for t in _list_tensors(layer):
                if t.weight is None and t not in own:
                    self._lock(t, f"%{t.name} is an input")
            self._couple(layer)
        for t in self.net.outputs:
            self._lock(t, f"%{t.name} is an output")
        self._propagate_locks()

    # queries

    def root(self, n: Node) -> Node:
        """The representative of a node's group."""
        while (up := self._up.setdefault(n, n)) != n:
            self._up[n] = self._up[up]
            n = up
        return n

    def nodes(self, layer: Layer) -> Iterator[Node]:
        """The axes of a layer's inputs and outputs."""
        return ((t, i) for t in _list_tensors(layer) for i in range(t.type.rank) if _find_growable_size((t, i)) is not None)

    def leaves(self, root: Node) -> list[Node]:
        """The roots of an axis's parts in order, recursively; the axis itself when it has no parts."""
        parts = self.parts_of.get(root)
        return [root] if parts is None else [leaf for p, _ in parts for leaf in self.leaves(p)]

    def layout(self, root: Node, sizes: Mapping[Node, int]) -> np.ndarray:
        """For each entry of the padded axis its old index (int64); a padding entry has ~(index of the entry before it).

        `sizes` are the new sizes of leaves.
        """
        parts = self.parts_of.get(root)
        if parts is None:
            n = get_axis_size(root)
            return np.concatenate([np.arange(n), np.full(sizes.get(root, n) - n, ~(n - 1))])
        pieces, at = [], 0
        for part, block in parts:
            inner = self.layout(part, sizes)[:, None]
            indices = at + np.maximum(inner, ~inner) * block + np.arange(block)
            pieces.append(np.where(inner < 0, ~indices, indices).reshape(-1))
            at += get_axis_size(part) * block
        return np.concatenate(pieces)

    # construction

    def _lock(self, t: Tensor, why: str) -> None:
        for i in range(t.type.rank):
            self._lock_node((t, i), why)

    def _lock_node(self, n: Node, why: str) -> None:
        if _find_growable_size(n) is not None:
            self.locked.setdefault(self.root(n), why)

    def _couple(self, layer: Layer) -> None:
        """Joins the axes that the layer couples, and locks the axes that its couples do not name."""
        o, why = get_op(layer.op), f"'{layer.name}' ({layer.op}) needs its size"
        if o.couples is None or layer.regions or layer.op not in FINITE or _pads_nonfinite(layer):
            for t in (*_list_tensors(layer), *(c for r in layer.regions.values() for c in r.captures())):
                self._lock(t, why)
            return
        couples, named = o.couples(layer), set()
        for c in couples:
            named |= {(c.a, c.a_axis), (c.b, c.b_axis)}
        for n in self.nodes(layer):
            if n not in named or (n[0] in self._scales and layer.op not in ("QuantizeLinear", "DequantizeLinear")):
                self._lock_node(n, why)
        ranges: dict[Node, list[tuple[int, Node, int]]] = {}
        for c in couples:
            self._add_couple(c, ranges, why)
        for whole, parts in ranges.items():
            self._add_parts(whole, parts, why)
        self._add_sum(layer, couples, why)

    def _add_couple(self, c: Couple, ranges: dict[Node, list[tuple[int, Node, int]]], why: str) -> None:
        """Joins two axes, or records that one is a range or blocks of the other."""
        a, b = (c.a, c.a_axis), (c.b, c.b_axis)
        n, m = _find_growable_size(a), _find_growable_size(b)
        if n is None or m is None or a == b or c.a_repeat * c.b_repeat > 1:
            self._lock_node(a, why)
            self._lock_node(b, why)
            return
        count = c.count if c.count is not None else (n - c.a_at) // c.a_block
        whole_a, whole_b = (c.a_at, c.a_block, count) == (0, 1, n), (c.b_at, c.b_block, count) == (0, 1, m)
        if whole_a and whole_b:
            self._join(a, b)
        elif whole_a:
            ranges.setdefault(b, []).append((c.b_at, a, c.b_block))
        elif whole_b:
            ranges.setdefault(a, []).append((c.a_at, b, c.a_block))
        else:
            self._lock_node(a, why)
            self._lock_node(b, why)

    def _add_parts(self, joined_axis: Node, parts: list[tuple[int, Node, int]], why: str) -> None:
        """Records the parts of an axis; entries that no part covers (a Pad's padding) become parts of their own."""
        covered: list[tuple[Node, int]] = []
        at, end = 0, get_axis_size(joined_axis)
        for start, part, block in [*sorted(parts, key=lambda p: p[0]), (end, joined_axis, 0)]:
            if start > at:
                gap = (Tensor("gap", TensorType(F32, (start - at,))), 0)
                self.gaps.add(gap)
                covered.append((gap, 1))
            if start < at:  # they overlap
                for n in (joined_axis, *(p for _, p, _ in parts)):
                    self._lock_node(n, why)
                return
            if block:
                covered.append((part, block))
            at = start + get_axis_size(part) * block
        self._relations.append((joined_axis, tuple(covered)))

    def _add_sum(self, layer: Layer, couples: list[Couple], why: str) -> None:
        """Records the axes that the layer sums over: they may be padded with constant weights, and are locked otherwise."""
        outs = set(layer.outputs)
        pairs = [((c.a, c.a_axis), (c.b, c.b_axis)) for c in couples]
        kept = {n for a, b in pairs for n in (a, b) if a[0] in outs or b[0] in outs}
        for a, b in pairs:
            if a in kept or b in kept:
                continue
            x, w = (a, b) if is_weight(b[0]) else (b, a)
            if not is_weight(w[0]) or _find_growable_size(x) is None or _find_growable_size(w) is None:
                self._lock_node(a, why)
                self._lock_node(b, why)
            if is_weight(w[0]):
                output_axis = next((n if n[0] in outs else m for n, m in pairs if {n[0], m[0]} == {w[0], layer.outputs[0]}), None)
                sizes = [d if isinstance(d, int) else _ASSUMED_SIZE if i else 1 for i, d in enumerate(layer.outputs[0].shape)]
                rows = [d for i, d in enumerate(sizes) if (layer.outputs[0], i) != output_axis]
                work = int(np.prod([d for d in w[0].shape if isinstance(d, int)], dtype=np.int64) * np.prod(rows, dtype=np.int64))
                made = output_axis if output_axis is not None and _find_growable_size(output_axis) is not None else None
                self.dense.append(Dense(layer, x if _find_growable_size(x) is not None else None, made, work))

    def _join(self, a: Node, b: Node) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._up[b] = a
            if b in self.locked:
                self.locked.setdefault(a, self.locked.pop(b))

    def _propagate_locks(self) -> None:
        """Converts relations of nodes to relations of roots; parts of a locked axis are locked too."""
        for whole, parts in self._relations:
            root, own_parts = self.root(whole), tuple((self.root(p), block) for p, block in parts)
            if self.parts_of.setdefault(root, own_parts) != own_parts:
                for n in (root, *(p for p, _ in (*own_parts, *self.parts_of[root]))):
                    self.locked.setdefault(n, f"%{whole[0].name} consists of parts in several ways")
        changed = True
        while changed:
            before = len(self.locked)
            for root, parts in self.parts_of.items():
                if root in self.locked:
                    for p, _ in parts:
                        self.locked.setdefault(p, self.locked[root])
            changed = len(self.locked) > before


def get_axis_size(n: Node) -> int:
    """Entries of an axis of static size."""
    return int(n[0].shape[n[1]])


def is_weight(t: Tensor) -> bool:
    """True if `t` is constant, or dequantized from constants with zero point 0, so that padding it with 0 gives zeros."""
    if t.weight is not None:
        return True
    if t.maker is None or t.maker.op != "DequantizeLinear" or any(i is not None and i.weight is None for i in t.maker.inputs):
        return False
    zero = t.maker.input(2)
    return zero is None or not zero.array().astype(np.float32).any()


def _pads_nonfinite(layer: Layer) -> bool:
    """True if a Pad may pad with NaN, infinity or a value computed at run time."""
    value = layer.input(2) if layer.op == "Pad" else None
    return value is not None and (value.weight is None or not np.isfinite(value.array().astype(np.float32)).all())


def _find_growable_size(n: Node) -> int | None:
    d = n[0].shape[n[1]]
    return d if isinstance(d, int) and d > 1 else None


def _list_tensors(layer: Layer) -> list[Tensor]:
    return list(dict.fromkeys(t for t in (*layer.inputs, *layer.outputs) if t is not None))

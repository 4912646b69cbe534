"""Axes that hold the same entries in several tensors, read off the ops' couples; and where entries go when some axes are filled up.

What may be cut together (ops' `couples`) may also be filled together: entries whose weights are zero are the inverse of a cut. Two things are
asked on top of it. A sum over filled entries must have a weight there, which is then zero; a product of two computed tensors has none.
And what stands in a filled entry must stay finite, because zero times infinity is none: only ops of `CALM` are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.network import F32, Layer, Network, Tensor, TensorType
from whet.ops import Couple, get_op

Node = tuple[Tensor, int]
"""An axis of a tensor, of static size two or more."""

CALM = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "ConvTranspose", "DequantizeLinear", "Elu", "Erf",
    "Flatten", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "MatMul", "Max",
    "MaxPool", "Min", "Mish", "Mul", "Neg", "PRelu", "Pad", "QuantizeLinear", "Relu", "Reshape", "Resize", "Selu", "Sigmoid", "Slice", "Softplus",
    "Softsign", "Split", "Squeeze", "Sub", "Swish", "Tanh", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Ops that make small finite numbers of small finite numbers."""

_UNKNOWN = 64  # entries of an axis that is sized at run time, for reckoning work; of the first, which counts samples: one


@dataclass(frozen=True)
class Dense:
    """A layer that sums over `read` with constant weights and makes `made` (None: an axis that cannot be followed), in `work` products."""

    layer: Layer
    read: Node | None
    made: Node | None
    work: int


@dataclass
class Ties:
    """The ties of a network's axes. Nodes stand for each other by `root`."""

    net: Network
    dense: list[Dense] = field(default_factory=list)
    locked: dict[Node, str] = field(default_factory=dict)  # root -> why nothing may be filled
    made_of: dict[Node, tuple[tuple[Node, int], ...]] = field(default_factory=dict)
    """Root -> (root of a part, entries of this axis for each of the part's), one part after the other."""
    between: set[Node] = field(default_factory=set)
    """Parts that are nothing else: what Pad puts before and behind, what Slice leaves out."""
    _up: dict[Node, Node] = field(default_factory=dict)
    _relations: list[tuple[Node, tuple[tuple[Node, int], ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scales = {t for x in self.net.layers if x.op in ("QuantizeLinear", "DequantizeLinear") for t in x.inputs[1:2] if t is not None}
        own = {t for x in self.net.layers for t in x.outputs}
        for layer in self.net.layers:
            for t in _tensors(layer):
                if t.weight is None and t not in own:
                    self._lock(t, f"%{t.name} is an input")
            self._follow(layer)
        for t in self.net.outputs:
            self._lock(t, f"%{t.name} is an output")
        self._settle()

    # asking

    def root(self, n: Node) -> Node:
        while (up := self._up.setdefault(n, n)) != n:
            self._up[n] = self._up[up]
            n = up
        return n

    def nodes(self, layer: Layer) -> Iterator[Node]:
        """The axes of a layer's inputs and outputs."""
        return ((t, i) for t in _tensors(layer) for i in range(t.type.rank) if _size((t, i)) is not None)

    def leaves(self, root: Node) -> list[Node]:
        """The roots that an axis is made of, one after the other; itself for one that is made of none."""
        parts = self.made_of.get(root)
        return [root] if parts is None else [leaf for p, _ in parts for leaf in self.leaves(p)]

    def layout(self, root: Node, sizes: Mapping[Node, int]) -> np.ndarray:
        """For each entry of the filled axis the place that it had. One that is filled has ~place of the one that it stands behind.

        `sizes` are the new ones of leaves.
        """
        parts = self.made_of.get(root)
        if parts is None:
            n = size(root)
            return np.concatenate([np.arange(n), np.full(sizes.get(root, n) - n, ~(n - 1))])
        found, at = [], 0
        for part, block in parts:
            inner = self.layout(part, sizes)[:, None]
            places = at + np.maximum(inner, ~inner) * block + np.arange(block)
            found.append(np.where(inner < 0, ~places, places).reshape(-1))
            at += size(part) * block
        return np.concatenate(found)

    # reading

    def _lock(self, t: Tensor, why: str) -> None:
        for i in range(t.type.rank):
            self._lock_node((t, i), why)

    def _lock_node(self, n: Node, why: str) -> None:
        if _size(n) is not None:
            self.locked.setdefault(self.root(n), why)

    def _follow(self, layer: Layer) -> None:
        """Ties what the layer's couples tie, and locks what they do not name."""
        o, why = get_op(layer.op), f"'{layer.name}' ({layer.op}) counts on it"
        if o.couples is None or layer.regions or layer.op not in CALM or _infinite(layer):
            for t in (*_tensors(layer), *(c for r in layer.regions.values() for c in r.captures())):
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
            self._tie(c, ranges, why)
        for whole, parts in ranges.items():
            self._tie_parts(whole, parts, why)
        self._sum(layer, couples, why)

    def _tie(self, c: Couple, ranges: dict[Node, list[tuple[int, Node, int]]], why: str) -> None:
        """Joins two axes, or notes that one is a range or blocks of the other."""
        a, b = (c.a, c.a_axis), (c.b, c.b_axis)
        n, m = _size(a), _size(b)
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

    def _tie_parts(self, whole: Node, parts: list[tuple[int, Node, int]], why: str) -> None:
        """An axis that others make up one after the other; what none of them is (Pad's padding) is a part of its own."""
        found: list[tuple[Node, int]] = []
        at, end = 0, size(whole)
        for start, part, block in [*sorted(parts, key=lambda p: p[0]), (end, whole, 0)]:
            if start > at:
                gap = (Tensor("between", TensorType(F32, (start - at,))), 0)
                self.between.add(gap)
                found.append((gap, 1))
            if start < at:  # they overlap
                for n in (whole, *(p for _, p, _ in parts)):
                    self._lock_node(n, why)
                return
            if block:
                found.append((part, block))
            at = start + size(part) * block
        self._relations.append((whole, tuple(found)))

    def _sum(self, layer: Layer, couples: list[Couple], why: str) -> None:
        """Notes what the layer sums over: with constant weights it may be filled, else not."""
        outs = set(layer.outputs)
        pairs = [((c.a, c.a_axis), (c.b, c.b_axis)) for c in couples]
        kept = {n for a, b in pairs for n in (a, b) if a[0] in outs or b[0] in outs}
        for a, b in pairs:
            if a in kept or b in kept:
                continue
            x, w = (a, b) if is_weight(b[0]) else (b, a)
            if not is_weight(w[0]) or _size(x) is None or _size(w) is None:
                self._lock_node(a, why)
                self._lock_node(b, why)
            if is_weight(w[0]):
                made = next((n if n[0] in outs else m for n, m in pairs if {n[0], m[0]} == {w[0], layer.outputs[0]}), None)
                sizes = [d if isinstance(d, int) else _UNKNOWN if i else 1 for i, d in enumerate(layer.outputs[0].shape)]
                rows = [d for i, d in enumerate(sizes) if (layer.outputs[0], i) != made]
                work = int(np.prod([d for d in w[0].shape if isinstance(d, int)], dtype=np.int64) * np.prod(rows, dtype=np.int64))
                followed = made if made is not None and _size(made) is not None else None
                self.dense.append(Dense(layer, x if _size(x) is not None else None, followed, work))

    def _join(self, a: Node, b: Node) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._up[b] = a
            if b in self.locked:
                self.locked.setdefault(a, self.locked.pop(b))

    def _settle(self) -> None:
        """From relations of nodes to relations of roots; what they lock is locked."""
        for whole, parts in self._relations:
            root, made = self.root(whole), tuple((self.root(p), block) for p, block in parts)
            if self.made_of.setdefault(root, made) != made:
                for n in (root, *(p for p, _ in (*made, *self.made_of[root]))):
                    self.locked.setdefault(n, f"%{whole[0].name} is put together in several ways")
        changed = True
        while changed:
            before = len(self.locked)
            for root, parts in self.made_of.items():
                if root in self.locked:
                    for p, _ in parts:
                        self.locked.setdefault(p, self.locked[root])
            changed = len(self.locked) > before


def size(n: Node) -> int:
    """Entries of an axis of static size."""
    return int(n[0].shape[n[1]])


def is_weight(t: Tensor) -> bool:
    """Whether `t` is constant, or dequantized of constants with zero point 0: zeros that it is filled with are zeros."""
    if t.weight is not None:
        return True
    if t.maker is None or t.maker.op != "DequantizeLinear" or any(i is not None and i.weight is None for i in t.maker.inputs):
        return False
    zero = t.maker.input(2)
    return zero is None or not zero.array().astype(np.float32).any()


def _infinite(layer: Layer) -> bool:
    """Whether a Pad may pad with what is no finite number."""
    value = layer.input(2) if layer.op == "Pad" else None
    return value is not None and (value.weight is None or not np.isfinite(value.array().astype(np.float32)).all())


def _size(n: Node) -> int | None:
    d = n[0].shape[n[1]]
    return d if isinstance(d, int) and d > 1 else None


def _tensors(layer: Layer) -> list[Tensor]:
    return list(dict.fromkeys(t for t in (*layer.inputs, *layer.outputs) if t is not None))

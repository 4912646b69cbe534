"""Quantization sites: the layers to quantize, the tensors that need a range, and which of them must share one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from whet.network import F32, Layer, Network, Tensor

WEIGHTED = ("Conv", "Gemm", "MatMul")
POOLS = ("AveragePool", "GlobalAveragePool")
#: Layers that only move or select values: their input and output have the same scale.
MOVES = (
    "Concat", "DepthToSpace", "Flatten", "MaxPool", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
)  # fmt: skip
UNARY = (
    "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Sigmoid", "Softplus", "Swish", "Tanh",
)  # fmt: skip
_T = TypeVar("_T")
_NOT_NEGATIVE = ("Relu", "Sigmoid", "Softplus", "HardSigmoid", "Exp", "Abs", "Softmax")


@dataclass
class QuantizationSites:
    """`layers` run in integers; `roots` are the tensors that get Q/DQ, each with the readers of the quantized value (None: all);
    `shared` maps each root to the name of its range group.

    `uses` maps each reader of a root to the range it needs: the tensor's own, or that of the Concat the reader leads to. A tensor whose
    readers need different ranges may have several forms (precision.joined)."""

    layers: list[Layer] = field(default_factory=list)
    roots: dict[Tensor, set[Layer] | None] = field(default_factory=dict)
    shared: dict[Tensor, str] = field(default_factory=dict)
    consumers: dict[Tensor, list[Layer]] = field(default_factory=dict)
    uses: dict[Tensor, dict[Layer, str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Names of the tensors to calibrate."""
        return [t.name for t in self.roots]

    def groups(self) -> dict[str, list[Tensor]]:
        """Tensors by range group."""
        groups: dict[str, list[Tensor]] = {}
        for t in self.roots:
            groups.setdefault(self.shared[t], []).append(t)
        return groups


def find_quantization_sites(net: Network, skip: Callable[[Layer], bool] | Iterable[str] = (), float_sums: Collection[str] = ()) -> QuantizationSites:
    """Finds the quantizable layers and tensors of `net` (batch norms folded).

    `skip` is a predicate or the names of layers that stay in floating point. `float_sums` names Add layers whose operands stay in floating
    point; those tensors are still quantized for their other readers.
    """
    names = set() if callable(skip) else set(skip)
    skips: Callable[[Layer], bool] = skip if callable(skip) else lambda x: x.name in names or bool(names & set(x.sources))
    return SiteFinder(net, skips, frozenset(float_sums)).find()


class Sets(Generic[_T]):
    """Union-find. An unknown item starts as a set of its own; iteration yields all items in order of first use."""

    def __init__(self) -> None:
        self._parent: dict[_T, _T] = {}

    def __iter__(self) -> Iterator[_T]:
        return iter(self._parent)

    def root(self, item: _T) -> _T:
        """The representative of the set of `item`."""
        while (parent := self._parent.setdefault(item, item)) != item:
            item = parent
        return item

    def join(self, a: _T, b: _T) -> None:
        """Unites the sets of `a` and `b`."""
        self._parent[self.root(b)] = self.root(a)


_Use = tuple[Tensor, Layer]


class SiteFinder:
    def __init__(self, net: Network, skips: Callable[[Layer], bool], float_sums: frozenset[str]):
        self.net, self.users, self.float_sums = net, net.users(), float_sums
        self.own = {layer for layer in net.layers if _has_quantized_form(layer) and not skips(layer)}
        self.skips = skips
        self.sites = QuantizationSites(layers=[x for x in net.layers if x in self.own])
        self.sets: Sets[_Use] = Sets()

    def find(self) -> QuantizationSites:
        for layer in self.sites.layers:
            x = layer.needs(0)
            self.require(x, layer)
            self.sites.consumers.setdefault(x, []).append(layer)
        grown = True
        while grown:  # operands of quantized sums and averages are quantized too, up the network
            before = len(self.sites.roots), sum(len(r) for r in self.sites.roots.values() if r)
            for layer in self.net.layers:
                if layer.op == "Add" and not self.skips(layer) and layer.name not in self.float_sums:
                    self.residual(layer)
                elif layer.op in POOLS and not self.skips(layer) and self.quantized_result(layer.output):
                    x = layer.needs(0)
                    if self.fusable(x):
                        self.require(x, layer)
            grown = before != (len(self.sites.roots), sum(len(r) for r in self.sites.roots.values() if r))
        for t in self.sites.roots:
            if self.fusable(t) and not any(t is o for o in self.net.outputs) and not self.summed_in_floats(t):
                self.sites.roots[t] = None
        order = {t: i for i, t in enumerate(self.net.tensors())}
        self.sites.roots = dict(sorted(self.sites.roots.items(), key=lambda item: order[item[0]]))
        self.name_ranges()
        return self.sites

    def name_ranges(self) -> None:
        """Names the range of each use (after its tensor, or after the first input of a Concat and a number) and the group of each tensor."""
        rank = {t: i for i, t in enumerate(self.sites.roots)}
        parts: dict[_Use, set[Tensor]] = {}
        for use in self.sets:
            parts.setdefault(self.sets.root(use), set()).add(use[0])
        joins = sorted((use for use, ts in parts.items() if len(ts) > 1), key=lambda use: sorted(rank[t] for t in parts[use]))
        names = {use: f"{min(parts[use], key=rank.__getitem__).name} + {i}" for i, use in enumerate(joins)}
        for t, reader in self.sets:
            self.sites.uses.setdefault(t, {})[reader] = names.get(self.sets.root((t, reader)), t.name)
        groups = Sets[str]()
        for uses in self.sites.uses.values():
            for name in uses.values():
                groups.join(next(iter(uses.values())), name)
        first: dict[str, str] = {}
        for t in self.sites.roots:
            self.sites.shared[t] = first.setdefault(groups.root(next(iter(self.sites.uses[t].values()))), t.name)

    def require(self, t: Tensor, reader: Layer) -> list[_Use]:
        """Records that `reader` reads `t` as integers: Q/DQ goes to the producer, above layers that only move values. Returns the uses."""
        maker = t.maker
        if maker is not None and only_moves(maker) and not any(t is o for o in self.net.outputs):
            data = [x for x in (maker.inputs if maker.op == "Concat" else maker.inputs[:1]) if x is not None]
            if data and not any(x.is_constant for x in data):
                found = [s for x in data for s in self.require(x, maker)]
                for other in found[1:]:
                    self.sets.join(found[0], other)
                return found
        if t.is_constant or t.dtype != F32:
            return []
        readers = self.sites.roots.setdefault(t, set())
        if readers is not None:
            readers.add(reader)
        self.sets.root((t, reader))
        return [(t, reader)]

    def residual(self, layer: Layer) -> None:
        """For a sum fused into a convolution: the other operand is quantized when the sum is, or when it is anyway."""
        a, b = layer.inputs[:2]
        if a is None or b is None or a.type != b.type or a is b or a.is_constant or b.is_constant:
            return
        heads = [t for t in (a, b) if self.takes_sum(t)]
        if not heads:
            if self.quantized_result(layer.output) and self.fusable(a) and self.fusable(b):
                self.require(a, layer)
                self.require(b, layer)
            return
        place = {t: self.net.layers.index(t.maker) if t.maker in self.net.layers else -1 for t in (a, b)}
        own = max(heads, key=lambda t: place[t])
        other = b if own is a else a
        if other in self.sites.roots or (self.quantized_result(layer.output) and self.fusable(other)):
            self.require(other, layer)

    def quantized_result(self, t: Tensor) -> bool:
        """True if `t`, or the activation applied to it, is quantized."""
        if t in self.sites.roots:
            return True
        readers = [r for r, _ in self.users.get(t, [])]
        if len(readers) == 1 and (readers[0].op in UNARY or only_moves(readers[0])) and len(readers[0].outputs) == 1:
            return self.quantized_result(readers[0].output)
        return False

    def summed_in_floats(self, t: Tensor) -> bool:
        """True if a float sum reads `t`, directly or through layers that only move values."""
        readers = [r for r, _ in self.users.get(t, [])] if self.float_sums else []
        return any(r.name in self.float_sums or (only_moves(r) and any(self.summed_in_floats(o) for o in r.outputs)) for r in readers)

    def takes_sum(self, t: Tensor) -> bool:
        """True if a quantized convolution or matrix product produces `t` for the sum only."""
        if len(self.users.get(t, [])) != 1:
            return False
        maker = t.maker
        if maker is None:
            return False
        if maker.op == "Mul":  # SiLU written as Mul and Sigmoid
            a, b = maker.required_inputs()
            gates = [(x, y.maker) for x, y in ((a, b), (b, a)) if y.maker is not None and y.maker.op == "Sigmoid"]
            return any(gate.inputs[0] is x and x.maker in self.own for x, gate in gates)
        return maker in self.own or (maker.op in UNARY and self.takes_sum(maker.needs(0)))

    def fusable(self, t: Tensor) -> bool:
        """True if the producer of `t` can store integers: a quantized layer, or a sum, activation or average applied to one."""
        maker = t.maker
        if maker is None:
            return False
        if maker in self.own:
            return True
        if maker.op in UNARY:
            return self.fusable(maker.needs(0))
        if maker.op in ("Add", "Mul"):
            return any(x is not None and self.fusable(x) for x in maker.inputs)
        return (maker.op in POOLS or only_moves(maker)) and self.fusable(maker.needs(0))


def only_moves(layer: Layer) -> bool:
    """True if a layer only moves values (or inserts zeros, which every range contains)."""
    if layer.op == "Resize":
        return layer.attrs.get("mode", "nearest") == "nearest"
    if layer.op == "Pad" and layer.attrs["mode"] == "constant":
        value = layer.input(2)
        return value is None or (value.is_constant and not value.array().any())
    return layer.op in MOVES


def _has_quantized_form(layer: Layer) -> bool:
    """True if a layer is a Conv, Gemm or MatMul with constant float weights that has a quantized form."""
    if layer.op not in WEIGHTED:
        return False
    x, w, b = layer.inputs[0], layer.inputs[1], layer.input(2)
    if x is None or w is None or x.is_constant or not w.is_constant or w.dtype != F32 or x.dtype != F32:
        return False
    if b is not None and not b.is_constant:
        return False
    if layer.op == "Conv":
        return True
    if layer.op == "Gemm":
        return not layer.attrs["transA"] and layer.attrs["alpha"] == 1 and layer.attrs["beta"] == 1
    return w.type.rank == 2 and x.type.rank >= 2


def is_never_negative(t: Tensor) -> bool:
    """True if the producers of `t` guarantee values >= 0."""
    maker = t.maker
    if maker is None:
        return False
    if maker.op in _NOT_NEGATIVE:
        return True
    if maker.op == "Clip":
        low = maker.input(1)
        return low is not None and low.is_constant and float(low.array().reshape(-1)[0]) >= 0
    if only_moves(maker) or maker.op in (*POOLS, "Add", "Mul"):
        data = maker.inputs if maker.op in ("Concat", "Add", "Mul") else maker.inputs[:1]
        return all(x is not None and is_never_negative(x) for x in data)
    return False

"""Cost models of widths and branches: parameters, FLOPs, channels; latency is in latency_cost.py.

A cost is a sum over items (constants, layers), each a function of the widths of the groups that touch it; removing a branch removes its
items. The dependency of items on groups makes changes cheap to evaluate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

from whet.network import Layer, Network, Tensor
from whet.ops._cost import count_operations
from whet.pruning.counting import list_trainable_constants
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch, remove_branches
from whet.pruning.sizes import Overlaps, Widths, collect_source_parts, resize_layer


class Costs:
    """`total(widths, removed)` in `unit`; `get_groups` maps items to groups, `gone` maps branches to removed items."""

    def __init__(
        self,
        unit: str,
        price: Callable[[str, Widths], float],
        groups_of: Mapping[str, tuple[str, ...]],
        gone: Mapping[str, frozenset[str]],
        added: Mapping[str, float] | None = None,
        measured: bool = False,
        expect: Callable[[Iterable[tuple[str, Widths]]], None] | None = None,
        unneeded: frozenset[str] = frozenset(),
        shares: Mapping[str, Mapping[str, float]] | None = None,
    ):
        """`added` is the cost a removed branch leaves in the network: layers that were fused with it; `shares` has, for each branch, the items whose
        cost changes with its removal, and the remaining share (a product that computes fewer rows). `measured` costs are noisy and expensive;
        `expect` receives the upcoming queries (items at widths), so that it can prepare several at once. `unneeded` items, which no output
        needs, leave with the first removed branch."""
        self.measured = measured
        self.unit, self._price, self._expect, self.groups_of, self.gone = unit, price, expect, groups_of, gone
        self.added, self._unneeded, self._shares = dict(added or {}), unneeded, dict(shares or {})
        self.items_of: dict[str, list[str]] = {}
        for item, names in groups_of.items():
            for name in names:
                self.items_of.setdefault(name, []).append(item)
        self._known: dict[tuple, float] = {}

    def item(self, name: str, widths: Widths) -> float:
        """The cost of one item at these widths (memoized)."""
        key = self._key(name, widths)
        if key not in self._known:
            self._known[key] = self._price(name, widths)
        return self._known[key]

    def expect(self, queries: Iterable[tuple[str, Widths]]) -> None:
        """Announces upcoming queries."""
        if self._expect is not None:
            self._expect((name, widths) for name, widths in queries if self._key(name, widths) not in self._known)

    def _key(self, name: str, widths: Widths) -> tuple:
        return (name, *(widths.get(g, -1) for g in self.groups_of[name]))

    def left(self, removed: Iterable[str]) -> list[str]:
        """Items that remain."""
        removed = tuple(removed)
        out = set().union(*(self.gone.get(b, frozenset()) for b in removed), self._unneeded if removed else ())
        return [i for i in self.groups_of if i not in out]

    def total(self, widths: Widths, removed: Iterable[str] = ()) -> float:
        """The cost of the network at these widths without the removed branches."""
        removed = list(removed)
        shares = [self._shares[b] for b in removed if self._shares.get(b)]
        left = sum(self.item(i, widths) * min((s.get(i, 1.0) for s in shares), default=1.0) for i in self.left(removed))
        return left + sum(self.added.get(b, 0.0) for b in removed)


def make_channel_costs(channel_groups: Sequence[Group], blocks: Sequence[Branch]) -> Costs:
    """The number of remaining units."""
    sizes = {g.name: g.size for g in channel_groups}
    return Costs(
        "channels", lambda name, w: w.get(name, sizes[name]), {g.name: (g.name,) for g in channel_groups}, _list_groups_inside(channel_groups, blocks)
    )


def _list_groups_inside(channel_groups: Sequence[Group], blocks: Sequence[Branch]) -> dict[str, frozenset[str]]:
    return {b.name: frozenset(g.name for g in channel_groups if set(g.layers) <= set(b.layers)) for b in blocks}


def make_parameter_costs(net: Network, channel_groups: Sequence[Group], blocks: Sequence[Branch]) -> Costs:
    """Parameters as count_params counts them."""
    counted = {t.name: t for t in list_trainable_constants(net)}
    shape, touching = _make_shape_functions(channel_groups)
    gone, unneeded = find_removed_items(net, blocks, lambda n: set(n.constants))
    groups_of = {n: touching([t]) for n, t in counted.items()}
    return Costs("parameters", lambda n, w: prod(shape(counted[n], w)), groups_of, gone, unneeded=unneeded)


def make_flop_costs(net: Network, channel_groups: Sequence[Group], blocks: Sequence[Branch], env: Mapping[str, int] | None = None) -> Costs:
    """FLOPs of one run as count_flops counts them; symbols default to 1."""
    values = {**dict.fromkeys(net.symbols(), 1), **(env or {})}
    layers = {x.name: x for x in net.layers}
    shape, touching = _make_shape_functions(channel_groups)

    def price(name: str, w: Widths) -> float:
        layer = layers[name]
        return count_operations(resize_layer(layer, {t: shape(t, w) for t in _list_tensors(layer)}), values)

    gone, unneeded = find_removed_items(net, blocks, lambda n: {x.name for x in n.layers})
    return Costs("FLOPs", price, {n: touching(_list_tensors(x)) for n, x in layers.items()}, gone, unneeded=unneeded)


#: cost models of the targets that are counted: f(net, groups, branches)
COUNTED: Mapping[str, Callable[[Network, Sequence[Group], Sequence[Branch]], Costs]] = {
    "flops": make_flop_costs, "params": make_parameter_costs,
    "channels": lambda net, channel_groups, blocks: make_channel_costs(channel_groups, blocks),
}  # fmt: skip


def find_removed_items(
    net: Network, blocks: Sequence[Branch], items: Callable[[Network], set[str]]
) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """The items that leave with each branch, and those that no output needs: these would depend on every branch."""
    needed = items(remove_branches(net, ()))
    return {b.name: frozenset(needed - items(remove_branches(net, [b.name]))) for b in blocks}, frozenset(items(net) - needed)


def _list_tensors(layer: Layer) -> list[Tensor]:
    return [t for t in (*layer.inputs, *layer.outputs) if t is not None]


def _make_shape_functions(channel_groups: Sequence[Group]):
    parts, overlaps = collect_source_parts(channel_groups), Overlaps.of(channel_groups)

    def shape(t: Tensor, w: Widths) -> tuple:
        return tuple(overlaps.size(d, parts[t, i], w) if (t, i) in parts else d for i, d in enumerate(t.shape))

    def list_touching(tensors: Iterable[Tensor]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.group for t in tensors for i in range(t.type.rank) for p in parts.get((t, i), ())))

    return shape, list_touching

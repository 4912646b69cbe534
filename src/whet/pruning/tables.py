"""Widths and branches as variables, with cost and loss tables over small subsets of them, filled on demand.

A variable is a group (its values are its widths, widest first) or a branch (0: kept, 1: removed). The scope of a table is the set of variables
that some layers' costs, or an importance, depend on. Costs may have to be measured, so entries are filled when needed; an unknown entry is
bounded from below by known narrower layers, assuming that a layer does not get slower when it gets narrower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.elimination import Scope

_MOST = 4096  # entries of one table; the bound of layers with more combinations of widths takes all widths but one as minimal
TINY = 1e-9  # relative tolerance of sums of costs and losses
Values = list[int]


@dataclass
class _Term:
    """Items that depend on the same groups and are removed with the same branches. `prices` over the groups' values; NaN if unknown.

    With too many groups for a table, `far` holds the prices by values, and `prices` is a lower bound over one group.
    """

    groups: Scope
    branches: Scope
    items: list[str]
    prices: np.ndarray
    far: dict[Scope, float] | None = None
    kept: Scope = ()  # the groups that `prices` is over
    memo: dict[Scope, float] = field(default_factory=dict)  # known prices by values, faster to read than an array

    @property
    def scope(self) -> Scope:
        return (*self.kept, *self.branches)


class Tables:
    """Variables, their values, and cost and loss tables over them. A state `x` is a list with one value per variable."""

    def __init__(
        self,
        channel_groups: Sequence[Group],
        blocks: Sequence[Branch],
        scores: Mapping[str, np.ndarray],
        costs: Costs,
        widths: Mapping[str, Sequence[int]],
    ):
        """`widths` are the allowed widths by group, including the full one; groups that no cost depends on stay whole."""
        self.costs, self.asked = costs, 0  # table entries priced so far
        self.groups = [g for g in channel_groups if g.name in costs.items_of]
        self.blocks = list(blocks)
        self.widths = [sorted(widths[g.name], reverse=True) for g in self.groups]
        self.sizes = [*(len(w) for w in self.widths), *(2 for _ in blocks)]
        self._first = len(self.groups)  # variables from here on are branches
        self._of = {g.name: v for v, g in enumerate(self.groups)}
        self._losses = self._loss_tables(scores)
        self.terms = self._cost_terms()
        self._added = {self._first + n: costs.added[b.name] for n, b in enumerate(blocks) if costs.added.get(b.name)}
        self.wide = any(t.far is not None for t in self.terms)  # some layer depends on more widths than a table can hold
        self._near: list[list[_Term]] = [[] for _ in self.sizes]
        for t in self.terms:
            for v in (*t.groups, *t.branches):
                self._near[v].append(t)
        self._by_loss: list[list[Scope]] = [[s for s in self._losses if v in s] for v in range(len(self.sizes))]
        self._around = [
            tuple(sorted({u for t in near for u in (*t.groups, *t.branches)} | {u for s in own for u in s} - {v}))
            for v, (near, own) in enumerate(zip(self._near, self._by_loss, strict=True))
        ]
        self._columns: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._steps_up: dict[tuple, list[tuple[float, int, float]]] = {}

    def _loss_tables(self, scores: Mapping[str, np.ndarray]) -> dict[Scope, np.ndarray]:
        """A group's loss counts if every enclosing branch is kept, a removed branch's if no enclosing branch is removed."""
        around: dict[int, list[int]] = {}
        for n, b in enumerate(self.blocks):
            inside, v = set(b.layers), self._first + n
            for g in self.groups:
                if set(g.layers) <= inside:
                    around.setdefault(self._of[g.name], []).append(v)
            for m, c in enumerate(self.blocks):
                if c is not b and set(c.layers) < inside:
                    around.setdefault(self._first + m, []).append(v)
        losses: dict[Scope, np.ndarray] = {}
        for g in self.groups:
            smallest = np.concatenate([[0.0], np.cumsum(np.sort(scores[g.name]))])
            own = smallest[[g.size - w for w in self.widths[self._of[g.name]]]]
            losses.update([self._masked_losses(self._of[g.name], own, around)])
        for n, b in enumerate(self.blocks):
            losses.update([self._masked_losses(self._first + n, np.array([0.0, float(scores[b.name].sum())]), around)])
        return losses

    def _masked_losses(self, v: int, own: np.ndarray, around: Mapping[int, list[int]]) -> tuple[Scope, np.ndarray]:
        scope = tuple(sorted([v, *around.get(v, ())]))
        table = np.zeros([self.sizes[u] for u in scope])
        table[tuple(slice(None) if u == v else 0 for u in scope)] = own
        return scope, table

    def _cost_terms(self) -> list[_Term]:
        leaving: dict[str, list[int]] = {}
        for n, b in enumerate(self.blocks):
            for item in self.costs.gone.get(b.name, ()):
                leaving.setdefault(item, []).append(self._first + n)
        alike: dict[tuple[Scope, Scope], list[str]] = {}
        for item, names in self.costs.groups_of.items():
            key = tuple(sorted(self._of[n] for n in names if n in self._of)), tuple(sorted(leaving.get(item, ())))
            alike.setdefault(key, []).append(item)
        terms = []
        for (groups, branches), items in alike.items():
            shape = [self.sizes[v] for v in groups]
            if prod(shape) <= _MOST:
                terms.append(_Term(groups, branches, items, np.full(shape, np.nan), kept=groups))
                continue
            t = _Term(groups, branches, items, np.zeros(()), {}, groups)
            narrow = [n - 1 for n in shape]
            least = self._price(t, tuple(narrow))
            alone = [self._price(t, (*narrow[:k], 0, *narrow[k + 1 :])) - least for k in range(len(groups))]
            k = int(np.argmax(alone))
            t.kept = groups[k : k + 1]
            t.prices = np.array([self._price(t, (*narrow[:k], n, *narrow[k + 1 :])) for n in range(shape[k])])
            terms.append(t)
        return terms

    def _price(self, t: _Term, at: Scope, ask: bool = True) -> float:
        """The term's cost with its groups at these values; NaN if it is unknown and `ask` is false."""
        known = t.far.get(at, np.nan) if t.far is not None else t.prices[at]
        if ask and known != known:
            widths = self._widths(t, at)
            known = sum(self.costs.item(i, widths) for i in t.items)
            if t.far is not None:
                t.far[at] = known
            else:
                t.prices[at] = known
                self.asked += 1
        return float(known)

    def _widths(self, t: _Term, at: Scope) -> dict[str, int]:
        """Kept units of the term's narrowed groups at these values."""
        return {self.groups[v].name: self.widths[v][n] for v, n in zip(t.groups, at, strict=True) if n}

    def _expect(self, v: int, x: Sequence[int]) -> None:
        """Announces to measured costs that all values of the width `v` are needed next."""
        terms = [t for t in self._near[v] if not any(x[b] for b in t.branches)]
        states = ((t, tuple(n if u == v else x[u] for u in t.groups)) for n in range(self.sizes[v]) for t in terms)
        self.costs.expect((i, self._widths(t, at)) for t, at in states for i in t.items)

    def price_all(self, most: int) -> bool:
        """Prices all table entries if at most `most` are unknown; returns True if all costs are known afterwards."""
        unknown = sum(int(np.isnan(t.prices).sum()) for t in self.terms)
        if unknown <= most:
            for t in self.terms:
                if t.far is None:
                    for at in product(*(range(n) for n in t.prices.shape)):
                        self._price(t, at)
        return unknown <= most and not self.wide

    def column(self, v: int, x: Sequence[int], ask: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Losses and costs of everything that depends on `v`, over its values, the others as in `x`. Unless `ask`, unknown costs are NaN."""
        key = (v, ask, *(x[u] for u in self._around[v]))
        if key not in self._columns:
            if ask and self.costs.measured and self.is_width(v):
                self._expect(v, x)
            loss = sum((self._losses[s][tuple(slice(None) if u == v else x[u] for u in s)] for s in self._by_loss[v]), np.zeros(self.sizes[v]))
            cost = np.zeros(self.sizes[v])
            for t in self._near[v]:
                if any(x[b] for b in t.branches if b != v):
                    continue
                at = [x[u] for u in t.groups]
                if v >= self._first:
                    cost[0] += self._price(t, tuple(at), ask)
                    continue
                position = t.groups.index(v)
                for n in range(self.sizes[v]):
                    at[position] = n
                    cost[n] += self._price(t, tuple(at), ask)
            cost[1:] += self._added.get(v, 0.0)
            if not ask and np.isnan(cost).any():
                return loss, cost  # not cached: the entry may be measured later
            self._columns[key] = loss, cost
        return self._columns[key]

    def steps_up(self, v: int, x: Sequence[int], target: float) -> list[tuple[float, int, float]]:
        """Steps of `v` that lose less: (-importance gained per cost, value, added cost), the best first. Unknown costs are left out.

        `target` only sets the smallest cost that a gain is divided by.
        """
        key = (v, x[v], target, *(x[u] for u in self._around[v]))
        if key not in self._steps_up:
            loss, costs = self.column(v, x, not self.costs.measured)
            gain, more = loss[x[v]] - loss, costs - costs[x[v]]
            rates = -gain / np.maximum(more, TINY * target)
            useful = np.flatnonzero((gain > TINY * loss[x[v]]) & (more == more))
            steps = sorted((float(rates[n]), int(n), float(more[n])) for n in useful)
            if np.isnan(costs).any():
                return steps  # not cached: the entry may be measured later
            self._steps_up[key] = steps
        return self._steps_up[key]

    def cost(self, x: Sequence[int]) -> float:
        """Total cost at these values."""
        total = 0.0
        for t in self.terms:
            if not t.branches or not any(x[b] for b in t.branches):
                at = tuple([x[v] for v in t.groups])
                known = t.memo.get(at)
                if known is None:
                    known = t.memo[at] = self._price(t, at)
                total += known
        return total + sum(a for v, a in self._added.items() if x[v])

    def loss(self, x: Sequence[int]) -> float:
        """Importance lost by removed branches and narrowed groups."""
        return float(sum(t[tuple(x[v] for v in s)] for s, t in self._losses.items()))

    def is_width(self, v: int) -> bool:
        """True if the variable is a group's width, not a branch."""
        return v < self._first

    def chosen(self, x: Sequence[int]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Widths of the narrowed groups outside removed branches; names of the removed branches."""
        removed = [b for n, b in enumerate(self.blocks) if x[self._first + n]]
        narrower = [(g, self.widths[v][x[v]]) for v, g in enumerate(self.groups) if x[v]]
        widths = {g.name: w for g, w in narrower if not any(set(g.layers) <= set(b.layers) for b in removed)}
        return widths, tuple(b.name for b in removed)

    def scopes(self) -> list[Scope]:
        """The scopes of the tables of `weighed`."""
        return list(dict.fromkeys([*self._losses, *(t.scope for t in self.terms if t.scope), *((v,) for v in self._added)]))

    def weigh_tables(self, price: float, losses: float = 1.0) -> tuple[list[np.ndarray], float]:
        """Tables of `losses` * loss + `price` * (known or bounded cost), in the order of `scopes`, and a constant."""
        tables = {s: np.zeros([self.sizes[v] for v in s]) for s in self.scopes()}
        constant = 0.0
        for s, table in self._losses.items():
            tables[s] += losses * table
        for t in self.terms:
            if t.scope:
                stay = (slice(None),) * len(t.kept) + (0,) * len(t.branches)
                tables[t.scope][stay] += price * _bound_prices(t.prices)
            else:
                constant += price * self._price(t, ())
        for v, a in self._added.items():
            tables[v,][1] += price * a
        return list(tables.values()), constant


def _bound_prices(prices: np.ndarray) -> np.ndarray:
    """Prices, with each unknown one replaced by the largest known price of equal or smaller widths, or 0."""
    unknown = np.isnan(prices)
    if not unknown.any():
        return prices
    low = np.where(unknown, 0.0, prices)
    for axis in range(low.ndim):
        low = np.flip(np.maximum.accumulate(np.flip(low, axis), axis=axis), axis)
    return np.where(unknown, low, prices)

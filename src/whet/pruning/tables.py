"""A choice of widths and branches as variables over small tables: what each costs and loses, priced when it is asked for.

A variable is a group (its values are its widths, the whole one first) or a branch (0 stays, 1 goes). A table names the variables that
some layers' costs, or an importance, depend on. Costs may have to be measured, so entries are filled as they are needed; what is not known
yet is bounded from below by the narrower layers that are, on the ground that a layer gets no slower by getting narrower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.elimination import Scope

_MOST = 4096  # entries of one table: layers in which more widths meet count, for the bound, as if all but one were narrow
Values = list[int]


@dataclass
class _Term:
    """Items that depend on the same groups and go with the same branches. `prices` over the groups' values; NaN is not known yet.

    With too many groups in it there are `far` prices by values, and `prices` are a lower bound over one of them.
    """

    groups: Scope
    branches: Scope
    items: list[str]
    prices: np.ndarray
    far: dict[Scope, float] | None = None
    kept: Scope = ()  # the groups that `prices` is over

    @property
    def scope(self) -> Scope:
        return (*self.kept, *self.branches)


class Tables:
    """Variables, their values, and tables of costs and losses over them. A state `x` is a list with a value for each variable."""

    def __init__(
        self, found: Sequence[Group], blocks: Sequence[Branch], scores: Mapping[str, np.ndarray], costs: Costs, widths: Mapping[str, Sequence[int]]
    ):
        """`widths` are those offered, by group, the whole one among them; groups that no cost depends on stay whole."""
        self.costs, self.asked = costs, 0  # entries of tables priced so far
        self.groups = [g for g in found if g.name in costs.items_of]
        self.blocks = list(blocks)
        self.widths = [sorted(widths[g.name], reverse=True) for g in self.groups]
        self.sizes = [*(len(w) for w in self.widths), *(2 for _ in blocks)]
        self._first = len(self.groups)  # variables from here on are branches
        self._of = {g.name: v for v, g in enumerate(self.groups)}
        self._losses = self._loss_tables(scores)
        self._terms = self._cost_terms()
        self._added = {self._first + n: costs.added[b.name] for n, b in enumerate(blocks) if costs.added.get(b.name)}
        self.wide = any(t.far is not None for t in self._terms)  # more widths meet in a layer than a table can hold
        self._near: list[list[_Term]] = [[] for _ in self.sizes]
        for t in self._terms:
            for v in (*t.groups, *t.branches):
                self._near[v].append(t)
        self._by_loss: list[list[Scope]] = [[s for s in self._losses if v in s] for v in range(len(self.sizes))]
        self._around = [
            tuple(sorted({u for t in near for u in (*t.groups, *t.branches)} | {u for s in own for u in s} - {v}))
            for v, (near, own) in enumerate(zip(self._near, self._by_loss, strict=True))
        ]
        self._columns: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    def _loss_tables(self, scores: Mapping[str, np.ndarray]) -> dict[Scope, np.ndarray]:
        """A group's loss counts while every branch around it stays, a removed branch's while none around it goes."""
        around: dict[int, list[int]] = {}
        for n, b in enumerate(self.blocks):
            inside, v = set(b.layers), self._first + n
            for g in self.groups:
                if set(g.layers) <= inside:
                    around.setdefault(self._of[g.name], []).append(v)
            for m, c in enumerate(self.blocks):
                if c is not b and set(c.layers) < inside:
                    around.setdefault(self._first + m, []).append(v)
        made: dict[Scope, np.ndarray] = {}
        for g in self.groups:
            smallest = np.concatenate([[0.0], np.cumsum(np.sort(scores[g.name]))])
            own = smallest[[g.size - w for w in self.widths[self._of[g.name]]]]
            made.update([self._while_all_stay(self._of[g.name], own, around)])
        for n, b in enumerate(self.blocks):
            made.update([self._while_all_stay(self._first + n, np.array([0.0, float(scores[b.name].sum())]), around)])
        return made

    def _while_all_stay(self, v: int, own: np.ndarray, around: Mapping[int, list[int]]) -> tuple[Scope, np.ndarray]:
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
        made = []
        for (groups, branches), items in alike.items():
            shape = [self.sizes[v] for v in groups]
            if prod(shape) <= _MOST:
                made.append(_Term(groups, branches, items, np.full(shape, np.nan), kept=groups))
                continue
            t = _Term(groups, branches, items, np.zeros(()), {}, groups)
            narrow = [n - 1 for n in shape]
            least = self._price(t, tuple(narrow))
            alone = [self._price(t, (*narrow[:k], 0, *narrow[k + 1 :])) - least for k in range(len(groups))]
            k = int(np.argmax(alone))
            t.kept = groups[k : k + 1]
            t.prices = np.array([self._price(t, (*narrow[:k], n, *narrow[k + 1 :])) for n in range(shape[k])])
            made.append(t)
        return made

    def _price(self, t: _Term, at: Scope, ask: bool = True) -> float:
        """The term's cost with its groups at these values; NaN where it is not known and not to be asked for."""
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
        """Units that stay of the term's groups at these values, of those that lose some."""
        return {self.groups[v].name: self.widths[v][n] for v, n in zip(t.groups, at, strict=True) if n}

    def _expect(self, v: int, x: Sequence[int]) -> None:
        """Tells measured costs that those over the values of the width `v` come next."""
        terms = [t for t in self._near[v] if not any(x[b] for b in t.branches)]
        states = ((t, tuple(n if u == v else x[u] for u in t.groups)) for n in range(self.sizes[v]) for t in terms)
        self.costs.expect((i, self._widths(t, at)) for t, at in states for i in t.items)

    def price_all(self, most: int) -> bool:
        """Prices every entry of the tables if there are at most `most` unknown ones; whether all costs are known then."""
        unknown = sum(int(np.isnan(t.prices).sum()) for t in self._terms)
        if unknown <= most:
            for t in self._terms:
                if t.far is None:
                    for at in product(*(range(n) for n in t.prices.shape)):
                        self._price(t, at)
        return unknown <= most and not self.wide

    def column(self, v: int, x: Sequence[int], ask: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Losses and costs over the values of `v`, the others as in `x`, of what depends on `v`. Unless `ask`, unknown costs are NaN."""
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
                place = t.groups.index(v)
                for n in range(self.sizes[v]):
                    at[place] = n
                    cost[n] += self._price(t, tuple(at), ask)
            cost[1:] += self._added.get(v, 0.0)
            if not ask and np.isnan(cost).any():
                return loss, cost  # it may be known later
            self._columns[key] = loss, cost
        return self._columns[key]

    def cost(self, x: Sequence[int]) -> float:
        """What all costs at these values."""
        stay = (t for t in self._terms if not any(x[b] for b in t.branches))
        return sum(self._price(t, tuple(x[v] for v in t.groups)) for t in stay) + sum(a for v, a in self._added.items() if x[v])

    def loss(self, x: Sequence[int]) -> float:
        """Importance lost: of removed branches as such, of other groups by their widths."""
        return float(sum(t[tuple(x[v] for v in s)] for s, t in self._losses.items()))

    def is_width(self, v: int) -> bool:
        """Whether the variable is a group's width and no branch."""
        return v < self._first

    def chosen(self, x: Sequence[int]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Widths of the groups that are narrower and stand in no branch that goes; names of the branches that go."""
        removed = [b for n, b in enumerate(self.blocks) if x[self._first + n]]
        narrower = [(g, self.widths[v][x[v]]) for v, g in enumerate(self.groups) if x[v]]
        widths = {g.name: w for g, w in narrower if not any(set(g.layers) <= set(b.layers) for b in removed)}
        return widths, tuple(b.name for b in removed)

    def scopes(self) -> list[Scope]:
        """The scopes of `weighed`."""
        return list(dict.fromkeys([*self._losses, *(t.scope for t in self._terms if t.scope), *((v,) for v in self._added)]))

    def weighed(self, price: float, losses: float = 1.0) -> tuple[list[np.ndarray], float]:
        """Tables of losses times `losses` plus known or bounded costs times `price`, by `scopes`, and a constant."""
        made = {s: np.zeros([self.sizes[v] for v in s]) for s in self.scopes()}
        constant = 0.0
        for s, table in self._losses.items():
            made[s] += losses * table
        for t in self._terms:
            if t.scope:
                stay = (slice(None),) * len(t.kept) + (0,) * len(t.branches)
                made[t.scope][stay] += price * _bounded(t.prices)
            else:
                constant += price * self._price(t, ())
        for v, a in self._added.items():
            made[v,][1] += price * a
        return list(made.values()), constant


def _bounded(prices: np.ndarray) -> np.ndarray:
    """Prices with, where one is unknown, the largest known one of layers as narrow or narrower, or 0."""
    unknown = np.isnan(prices)
    if not unknown.any():
        return prices
    low = np.where(unknown, 0.0, prices)
    for axis in range(low.ndim):
        low = np.flip(np.maximum.accumulate(np.flip(low, axis), axis=axis), axis)
    return np.where(unknown, low, prices)

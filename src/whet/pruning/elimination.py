"""Minimization of a sum of tables over discrete variables by bucket elimination: the Lagrangian of widths and branches has this form.

Bucket elimination (R. Dechter, Artificial Intelligence 113, 1999): the tables that contain a variable are added and minimized over it into
a new table. The result is exact and includes the argmin. Where a sum would have too many entries its tables are minimized separately
(mini-buckets: R. Dechter and I. Rish, Journal of the ACM 50, 2003); then the result is a lower bound with good values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

Scope = tuple[int, ...]  # variables of a table in ascending order: its axes


@dataclass(frozen=True)
class _Part:
    """One elimination step: tables (by slot) are added over `scope` and minimized over one variable into slot `sent`."""

    slots: tuple[int, ...]
    scope: Scope
    axis: int
    sent: int


class Elimination:
    """The elimination order for tables of these scopes, independent of their entries.

    `sizes` are the domain sizes of the variables; every variable occurs in a scope. `exact` is False with mini-buckets.
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope], most: int = 1 << 19):
        """`most` is the largest number of entries of a summed table."""
        self.sizes, self.exact, self.order = list(sizes), True, []
        self._parts: list[list[_Part]] = []
        self._scopes: list[Scope] = [tuple(s) for s in scopes]
        live = dict(enumerate(self._scopes))
        left = set(range(len(sizes)))
        while left:
            v = min(left, key=lambda v: (prod(sizes[u] for u in set().union(*(s for s in live.values() if v in s))), v))
            bucket = sorted((k for k, s in live.items() if v in s), key=lambda k: -prod(sizes[u] for u in live[k]))
            groups: list[tuple[list[int], set[int]]] = []
            for k in bucket:
                home = next((g for g in groups if prod(sizes[u] for u in g[1] | set(live[k])) <= most), None)
                if home is None:
                    groups.append(([k], set(live[k])))
                else:
                    home[0].append(k)
                    home[1].update(live[k])
            self.exact &= len(groups) == 1
            parts = []
            for slots, names in groups:
                scope = tuple(sorted(names))
                parts.append(_Part(tuple(slots), scope, scope.index(v), len(self._scopes)))
                self._scopes.append(tuple(u for u in scope if u != v))
                live[parts[-1].sent] = self._scopes[-1]
            for k in bucket:
                del live[k]
            self.order.append(v)
            self._parts.append(parts)
            left.remove(v)
        self._ends = [k for k, s in live.items() if not s]

    def run(self, tables: Sequence[np.ndarray]) -> Swept:
        """Minimizes the sum of `tables`, whose shapes are those of the scopes."""
        slots: list[np.ndarray] = [*tables, *(np.zeros(()),) * (len(self._scopes) - len(tables))]
        for parts in self._parts:
            for p in parts:
                whole = reduce(np.add, (self._wide(slots[k], self._scopes[k], p.scope) for k in p.slots))
                slots[p.sent] = whole.min(axis=p.axis)
        return Swept(self, slots, float(sum(slots[k] for k in self._ends)))

    def _wide(self, table: np.ndarray, scope: Scope, among: Scope) -> np.ndarray:
        return table.reshape([self.sizes[u] if u in scope else 1 for u in among])


@dataclass(frozen=True)
class Swept:
    """A finished elimination: `least` is the minimum (or a lower bound); the argmin is available."""

    plan: Elimination
    slots: list[np.ndarray]
    least: float

    def values(self) -> list[int]:
        """The minimizing value of each variable (ties: the first)."""
        x = [0] * len(self.plan.sizes)
        for n in range(len(x)):
            x[self.plan.order[-1 - n]] = int(np.argmin(self.regrets(n, x)))
        return x

    def regrets(self, n: int, x: Sequence[int]) -> np.ndarray:
        """Increase of the minimum for each value of the n-th variable from the end, with the earlier variables fixed to `x`."""
        place = len(self.plan.order) - 1 - n
        v = self.plan.order[place]
        total = np.zeros(self.plan.sizes[v])
        for p in self.plan._parts[place]:
            for k in p.slots:
                total += self.slots[k][tuple(slice(None) if u == v else x[u] for u in self.plan._scopes[k])]
            total -= self.slots[p.sent][tuple(x[u] for u in self.plan._scopes[p.sent])]
        return total

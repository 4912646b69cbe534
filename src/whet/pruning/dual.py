"""Lagrangian dual of the budget problem: a lower bound of the loss, and the states near the optimal multiplier.

For a multiplier (price per unit of cost) the minimum of loss + price * (cost - target) over all states is a lower bound of the smallest
loss within the target. The bound is largest where two states, one above the target and one within it, are equally good; the search tries
the price at which the two current states tie (G. Y. Handler and I. Zang, Networks 10, 1980, who close the remaining gap by ranking states;
here branch and bound with the elimination tables as bound does: K. Kask and R. Dechter, Artificial Intelligence 129, 2001).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whet.pruning.elimination import Elimination, Swept
from whet.pruning.rounding import descend, exchange, round_to_budget
from whet.pruning.tables import Tables, Values

Progress = Callable[[int, int, str], None]
_PRICES, _ROUNDS, _EXCHANGES, _NODES = 24, 2, 400, 20_000  # prices; measuring rounds per price; value exchanges; nodes of branch and bound
_PRICED = 40_000  # unknown entries that are evaluated at once when costs are only counted
_CLOSE = 1.02  # ratio of two prices at which bisection stops
_CLOSED, _LITTLE = 1e-6, 1e-3  # relative gaps: regarded as closed; too small for exchanges or further measurements


@dataclass(frozen=True)
class Solution:
    """The best state within the target, or None; `bound` is a lower bound of its loss, `least` the smallest cost seen."""

    x: Values | None
    bound: float
    least: float


class Search:
    """Searches the state with the smallest loss at a cost of at most `target`."""

    def __init__(self, tables: Tables, target: float, progress: Progress | None = None):
        self.tables, self.target, self._progress = tables, target, progress
        self._complete = not tables.costs.measured and tables.price_all(_PRICED)
        self._plan = Elimination(tables.sizes, tables.scopes())
        self._best: Values | None = None
        self._last: Values | None = None  # the state at the previous price
        self._lost = float("inf")
        self._bound = 0.0

    def run(self) -> Solution:
        """Runs the price search, rounding from both sides, exchanges, and branch and bound where the tables are complete."""
        dear = [0] * len(self.tables.sizes)
        cheap, _ = self._solve_at(float("inf"))
        if self.tables.cost(cheap) > self.target:
            return Solution(None, 0.0, self.tables.cost(cheap))
        best = None
        if self.tables.wide:
            self._bisect(dear, cheap)
        else:
            best = self._climb(dear, cheap)
        if self._best is None:
            self._offer(cheap)
        if self._is_open(_LITTLE) and self._best is not None and not self.tables.wide:
            self._offer(exchange(self.tables, self._best, self.target, _EXCHANGES))
        if self._is_open() and self._complete and best is not None:
            self._close(*best)
        return Solution(self._best, min(self._bound, self._lost), self.tables.cost(cheap))

    def _climb(self, dear: Values, cheap: Values) -> tuple[float, Swept, float] | None:
        """Narrows the price between a state above the target and one within it; returns price, sweep and constant of the best bound."""
        t, best = self.tables, None
        enough = _LITTLE if t.costs.measured else _CLOSED
        for n in range(_PRICES):
            (loss, cost), (more, less) = (t.loss(dear), t.cost(dear)), (t.loss(cheap), t.cost(cheap))
            if not (cost > less and more > loss):
                break
            price = (more - loss) / (cost - less)
            x, (swept, constant) = self._solve_at(price)
            bound = swept.least + constant - price * self.target
            if best is None or bound > self._bound:
                best, self._bound = (price, swept, constant), max(bound, self._bound)
            self._offer(x)
            total = t.cost(x)
            if self._progress is not None:
                self._progress(n + 1, _PRICES, f"{total:.4g} {t.costs.unit}")
            if t.loss(x) + price * total >= (loss + price * cost) * (1 - 1e-12) or not self._is_open(enough):
                break
            dear, cheap = (x, cheap) if total > self.target else (dear, x)
        return best

    def _bisect(self, dear: Values, cheap: Values) -> None:
        """As `_climb` for inexact elimination: states are local optima, and prices are bisected until they are close."""
        t, low, high = self.tables, 0.0, float("inf")
        price = t.loss(cheap) / (t.cost(dear) - t.cost(cheap))
        for n in range(_PRICES):
            x, (swept, constant) = self._solve_at(price)
            self._bound = max(self._bound, swept.least + constant - price * self.target)
            total = t.cost(x)
            if self._progress is not None:
                self._progress(n + 1, _PRICES, f"{total:.4g} {t.costs.unit}")
            if total > self.target:
                dear, low = x, price
            else:
                cheap, high = x, price
            if high < low * _CLOSE:
                break
            price = price * 4 if high == float("inf") else price / 4 if low == 0 else (low * high) ** 0.5
        self._offer(cheap)
        self._offer(dear)

    def _solve_at(self, price: float) -> tuple[Values, tuple[Swept, float]]:
        """The best state at a price, and the sweep that bounds all states; queries costs around each candidate state."""
        t = self.tables
        for _ in range(_ROUNDS):
            weighed, constant = t.weigh_tables(1.0, 0.0) if price == float("inf") else t.weigh_tables(price)
            swept = self._plan.run(weighed)
            x, asked = swept.values(), t.asked
            if t.wide and self._last is not None and price < float("inf"):
                x = min(x, self._last, key=lambda y: t.loss(y) + price * t.cost(y))
            x = descend(t, x, price)
            if t.asked == asked:
                break
        self._last = x
        return x, (swept, constant)

    def _offer(self, x: Values) -> None:
        """Rounds `x` and keeps the result if it is the best so far."""
        y = round_to_budget(self.tables, x, self.target)
        if y is not None and self.tables.loss(y) < self._lost:
            self._best, self._lost = y, self.tables.loss(y)

    def _is_open(self, gap: float = _CLOSED) -> bool:
        return self._lost - self._bound > gap * self._lost

    def _close(self, price: float, swept: Swept, constant: float) -> None:
        """Depth-first branch and bound; when it completes, the best loss is optimal."""
        t = self.tables
        weighed, fixed = t.weigh_tables(1.0, 0.0)
        cheapest = self._plan.run(weighed)
        x, depth = [0] * len(t.sizes), len(t.sizes)
        waiting = [(0, -1, swept.least + constant - price * self.target, cheapest.least + fixed)]  # position, value, bound, least cost
        for _ in range(_NODES):
            if not waiting:
                self._bound = self._lost
                return
            n, value, bound, cost = waiting.pop()
            if bound >= self._lost * (1 - _CLOSED):
                continue
            if n:
                x[self._plan.order[-n]] = value
            if n == depth:
                if t.cost(x) <= self.target:
                    self._keep(x)
                continue
            worse, dearer = swept.regrets(n, x), cheapest.regrets(n, x)
            within = [k for k in range(len(worse)) if cost + dearer[k] <= self.target * (1 + 1e-9)]
            waiting += [(n + 1, k, bound + worse[k], cost + dearer[k]) for k in sorted(within, key=lambda k: -worse[k])]

    def _keep(self, x: Values) -> None:
        if self.tables.loss(x) < self._lost:
            self._best, self._lost = list(x), self.tables.loss(x)

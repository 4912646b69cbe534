"""Local search over states: coordinate descent at a price, greedy steps down to the budget, steps back up, and exchanges.

States are values of `Tables`. With measured costs, steps are restricted to entries that have been measured (`tables.costs.measured`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.pruning.tables import TINY, Tables, Values

_SWEEPS, _ALIKE = 8, 0.01  # rounds over all variables; relative tolerance of measured costs


def find_steps(costs: Sequence[float] | np.ndarray, alike: float = _ALIKE) -> list[int]:
    """Indices of the step edges in costs ordered by falling width: widths cheaper than every wider one by more than the fraction `alike`."""
    kept, least = [0], costs[0]
    for n, c in enumerate(costs):
        if c < least * (1 - alike):
            kept.append(n)
            least = c
    return kept


def descend(tables: Tables, x: Values, price: float) -> Values:
    """Coordinate descent: sets each variable in turn to the minimum of loss + `price` * cost, the others fixed, until no variable changes.

    An infinite price minimizes the cost alone. Among values of equal cost the widest is taken.
    """
    x = list(x)
    for _ in range(_SWEEPS):
        moved = False
        for v in range(len(x)):
            loss, cost = tables.column(v, x)
            offered = find_steps(cost, _ALIKE if tables.costs.measured else 0.0) if tables.is_width(v) else [0, 1]
            value = cost if price == float("inf") else loss + price * cost
            best = min(offered, key=lambda n: (value[n], n))
            if best != x[v]:
                x[v], moved = best, True
        if not moved:
            break
    return x


def step_down(tables: Tables, x: Values, target: float, fixed_variable: int = -1) -> Values | None:
    """Greedy steps with the least loss per cost saved until the cost is at most `target`; None if no step saves.
    The variable with the index `fixed_variable` keeps its value (-1: none)."""
    x, cost = list(x), tables.cost(x)
    while cost > target:
        found = []
        for v in range(len(x)):
            if v == fixed_variable:
                continue
            loss, costs = tables.column(v, x, not tables.costs.measured)
            saved = costs[x[v]] - costs
            at = np.flatnonzero(saved > TINY * cost)  # unknown costs (NaN) compare false
            if len(at):
                rates = (loss[at] - loss[x[v]]) / np.minimum(saved[at], cost - target)
                n = int(np.argmin(rates))
                found.append((rates[n], v, int(at[n])))
        if not found:
            return None
        for _, v, n in sorted(found)[: count_steps_per_comparison(tables)]:
            x[v] = n
            cost = tables.cost(x)
            if cost <= target:
                break
    return x


def fill_budget(tables: Tables, x: Values, target: float) -> Values:
    """Spends the remaining budget: repeats the step up with the most importance per cost while one fits."""
    x = list(x)
    while True:
        room, found = target - tables.cost(x), []
        for v in range(len(x)):
            best = next(((rate, v, n) for rate, n, more in tables.steps_up(v, x, target) if more <= room), None)
            if best is not None:
                found.append(best)
        if not found:
            return x
        for _, v, n in sorted(found)[: count_steps_per_comparison(tables)]:
            old, x[v] = x[v], n
            if tables.cost(x) > target:
                x[v] = old
                break


def count_steps_per_comparison(tables: Tables) -> int:
    """Steps taken per comparison of all variables: several if many layers depend on each width, since comparisons are slow then."""
    return 1 + len(tables.sizes) // 12 if tables.wide else 1


def round_to_budget(tables: Tables, x: Values, target: float, fixed_variable: int = -1) -> Values | None:
    """Steps down if over the budget, then fills it. None if the target cannot be met."""
    fits = step_down(tables, x, target, fixed_variable)
    return None if fits is None else fill_budget(tables, fits, target)


def exchange(tables: Tables, x: Values, target: float, tries: int) -> Values:
    """Changes one variable and rounds the others, while that reduces the loss; tries at most `tries` values."""
    lost, v, still = tables.loss(x), 0, 0
    while tries > 0 and still < len(x):
        better = None
        known = tables.column(v, x, not tables.costs.measured)[1]
        for n in range(tables.sizes[v]):
            if n == x[v] or np.isnan(known[n]):
                continue
            tries -= 1
            y = round_to_budget(tables, [n if u == v else old for u, old in enumerate(x)], target, v)
            if y is not None and tables.loss(y) < lost * (1 - TINY):
                better, lost = y, tables.loss(y)
        x, still = (better, 0) if better is not None else (x, still + 1)
        v = (v + 1) % len(x)
    return x

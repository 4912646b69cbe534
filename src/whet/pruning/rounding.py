"""From a state to a good one within the budget: each variable at its best for a price, steps down until it fits, steps back, exchanges.

States are values of `Tables`. Where costs are measured, steps are taken only among what was measured before (`tables.costs.measured`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.pruning.tables import Tables, Values

_SWEEPS, _ALIKE, _TINY = 8, 0.01, 1e-9  # rounds over all variables; relative difference of measured costs that are equal; of sums


def steps(costs: Sequence[float] | np.ndarray, alike: float = _ALIKE) -> list[int]:
    """Places of the step edges in costs by falling width: those that cost less than every wider one, by more than `alike` of it."""
    kept, least = [0], costs[0]
    for n, c in enumerate(costs):
        if c < least * (1 - alike):
            kept.append(n)
            least = c
    return kept


def settled(tables: Tables, x: Values, price: float) -> Values:
    """Each variable in turn at the value at which loss plus `price` times cost is least, given the others, until none moves.

    An infinite price counts costs alone. Of values that cost alike the widest stands.
    """
    x = list(x)
    for _ in range(_SWEEPS):
        moved = False
        for v in range(len(x)):
            loss, cost = tables.column(v, x)
            offered = steps(cost, _ALIKE if tables.costs.measured else 0.0) if tables.is_width(v) else [0, 1]
            value = cost if price == float("inf") else loss + price * cost
            best = min(offered, key=lambda n: (value[n], n))
            if best != x[v]:
                x[v], moved = best, True
        if not moved:
            break
    return x


def stepped_down(tables: Tables, x: Values, target: float, held: int = -1) -> Values | None:
    """Steps that lose least for what they save, until the cost is at most `target`; None where none saves any more. `held` stays."""
    x, cost = list(x), tables.cost(x)
    while cost > target:
        found = []
        for v in range(len(x)):
            if v == held:
                continue
            loss, costs = tables.column(v, x, not tables.costs.measured)
            saved = costs[x[v]] - costs
            at = np.flatnonzero(saved > _TINY * cost)  # what is unknown (NaN) is not offered
            if len(at):
                rates = (loss[at] - loss[x[v]]) / np.minimum(saved[at], cost - target)
                n = int(np.argmin(rates))
                found.append((rates[n], v, int(at[n])))
        if not found:
            return None
        for _, v, n in sorted(found)[: _at_once(tables)]:
            x[v] = n
            cost = tables.cost(x)
            if cost <= target:
                break
    return x


def filled(tables: Tables, x: Values, target: float) -> Values:
    """Spends what is left of the budget: the step back that returns most importance for its cost, as long as one fits."""
    x = list(x)
    while True:
        room, found = target - tables.cost(x), []
        for v in range(len(x)):
            loss, costs = tables.column(v, x, not tables.costs.measured)
            gain, more = loss[x[v]] - loss, costs - costs[x[v]]
            at = np.flatnonzero((gain > _TINY * loss[x[v]]) & (more <= room))
            if len(at):
                rates = gain[at] / np.maximum(more[at], _TINY * target)
                n = int(np.argmax(rates))
                found.append((-rates[n], v, int(at[n])))
        if not found:
            return x
        for _, v, n in sorted(found)[: _at_once(tables)]:
            old, x[v] = x[v], n
            if tables.cost(x) > target:
                x[v] = old
                break


def _at_once(tables: Tables) -> int:
    """Steps that are taken by one comparison of all: several where many layers read each width, for there a comparison takes long."""
    return 1 + len(tables.sizes) // 12 if tables.wide else 1


def rounded(tables: Tables, x: Values, target: float, held: int = -1) -> Values | None:
    """Stepped down if it has to be, then filled. None where it does not come to fit."""
    fits = stepped_down(tables, x, target, held)
    return None if fits is None else filled(tables, fits, target)


def exchanged(tables: Tables, x: Values, target: float, tries: int) -> Values:
    """Another value of one variable, the others rounded around it, as long as that loses less; `tries` such values at most."""
    lost, v, still = tables.loss(x), 0, 0
    while tries > 0 and still < len(x):
        better = None
        known = tables.column(v, x, not tables.costs.measured)[1]
        for n in range(tables.sizes[v]):
            if n == x[v] or np.isnan(known[n]):
                continue
            tries -= 1
            y = rounded(tables, [n if u == v else old for u, old in enumerate(x)], target, v)
            if y is not None and tables.loss(y) < lost * (1 - _TINY):
                better, lost = y, tables.loss(y)
        x, still = (better, 0) if better is not None else (x, still + 1)
        v = (v + 1) % len(x)
    return x

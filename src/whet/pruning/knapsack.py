"""What to keep under a budget: the least importance lost for a cost (milliseconds, FLOPs, parameters), over width, heads and depth at once.

The items of this knapsack are not independent: a convolution's time depends on the widths of both its sides, and a branch takes its
widths along. So the budget becomes a price: for a price of one unit of cost each group in turn takes the width at which what it loses plus
what its layers cost is least, given the others, until none moves; then the price is bisected until the cost is just under the budget. What
is left of the budget goes to the steps that give most back. Only step edges are widths: of two widths that cost alike the wider one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.importance import step_of

Progress = Callable[[int, int, str], None]
_SWEEPS, _PRICES, _ALIKE = 8, 18, 0.01  # rounds over all groups at one price; prices tried; relative difference of equal costs


@dataclass(frozen=True)
class Choice:
    """Kept channels by group (of the groups that lose some), branches that go, cost before and after, importance lost."""

    kept: Mapping[str, np.ndarray]
    removed: tuple[str, ...]
    before: float
    after: float
    lost: float


def widths_of(g: Group, multiple: int = 8, most: int = 12) -> list[int]:
    """Units that may be kept: whole multiples of `multiple` channels and the full size, at most `most` of them, widest last."""
    step = step_of(g, multiple)
    every = [n for n in range(step, g.size, step)]
    if len(every) >= most:
        every = [every[i] for i in np.linspace(0, len(every) - 1, most - 1).round().astype(int)]
    return [*every, g.size]


def edges(widths: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The step edges: widths (ascending) such that no wider one costs as little, within a hundredth."""
    kept: list[int] = []
    least = float("inf")
    for w, c in sorted(zip(widths, costs, strict=True), reverse=True):
        if c < least * (1 - _ALIKE) or not kept:
            kept.append(w)
            least = c
    return kept[::-1]


def choose_within(
    found: Sequence[Group],
    blocks: Sequence[Branch],
    scores: Mapping[str, np.ndarray],
    costs: Costs,
    target: float,
    *,
    multiple: int = 8,
    most: int = 12,
    progress: Progress | None = None,
) -> Choice:
    """The choice that loses least at a total cost of at most `target` (in the costs' unit).

    `scores` are importance()'s, of groups and branches. Raises PruneError when the target is out of reach or no number above 0.
    """
    if not target > 0:
        raise PruneError(f"the target is a {costs.unit} above 0, not {target}")
    solver = _Solver(found, blocks, scores, costs, multiple, most)
    before = costs.total({})
    if before <= target:
        return Choice({}, (), before, before, 0.0)
    low, high = 0.0, solver.scale() / before
    feasible = None
    for n in range(_PRICES):
        price = high if feasible is None else (low * high) ** 0.5 if low > 0 else high / 4
        state = solver.settle(price, feasible if feasible is not None else None)
        total = costs.total(*state)
        if total <= target:
            feasible, high = state, price
        else:
            low = price
            if feasible is None:
                high *= 4
        if progress is not None:
            progress(n + 1, _PRICES, f"{total:.4g} {costs.unit}")
        if feasible is not None and low > 0 and high / low < 1.02:
            break
    if feasible is None:
        least = solver.settle(float("inf"), None)
        if (total := costs.total(*least)) > target:
            raise PruneError(
                f"the target of {target:.4g} {costs.unit} is out of reach: with the least of everything {total:.4g} of {before:.4g} stay. "
                "Allow more (a smaller --multiple, fewer --skip), or another target."
            )
        feasible = least
    widths, removed = solver.fill(feasible, target)
    kept = {}
    for g in found:
        if not solver.dead(g, removed) and widths.get(g.name, g.size) < g.size:
            kept[g.name] = np.sort(np.argsort(-scores[g.name], kind="stable")[: widths[g.name]])
    return Choice(kept, tuple(b.name for b in blocks if b.name in removed), before, costs.total(widths, removed), solver.lost(widths, removed))


def per_layer(found: Sequence[Group], blocks: Sequence[Branch], scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Normalised scores times the weights that a unit takes from: a channel of a residual stream is lost to every layer on it.

    A branch counts what its groups count together. Taylor terms need none of this: they are changes of one loss already.
    """
    made = {g.name: scores[g.name] * max(1, sum(t.type.rank > 1 for t, _, _ in g.weights())) for g in found}
    for b in blocks:
        own = [made[g.name].sum() for g in found if set(g.layers) <= set(b.layers)]
        made[b.name] = np.array([float(sum(own))]) if own else scores[b.name]
    return made


State = tuple[dict[str, int], frozenset[str]]


class _Solver:
    def __init__(self, found, blocks, scores, costs: Costs, multiple: int, most: int):
        self.found, self.blocks, self.costs = list(found), list(blocks), costs
        self.widths = {g.name: widths_of(g, multiple, most) for g in found}
        self.losses = {}
        for g in found:
            smallest = np.concatenate([[0.0], np.cumsum(np.sort(scores[g.name]))])
            self.losses[g.name] = {w: float(smallest[g.size - w]) for w in self.widths[g.name]}
        self.block_loss = {b.name: float(scores[b.name].sum()) for b in blocks}
        self.inside = {b.name: [g.name for g in found if set(g.layers) <= set(b.layers)] for b in blocks}
        self.within = {b.name: [c.name for c in blocks if c is not b and set(c.layers) < set(b.layers)] for b in blocks}

    def scale(self) -> float:
        """Importance of everything: what a price is measured against."""
        return sum(max(v.values()) for v in self.losses.values()) + sum(self.block_loss.values()) or 1.0

    def dead(self, g: Group, removed) -> bool:
        """Whether the group lies in a branch that goes."""
        return any(g.name in self.inside[b] for b in removed)

    def lost(self, widths: Mapping[str, int], removed) -> float:
        """Importance lost: of removed branches as such, of other groups by their widths."""
        gone = {n for b in removed for n in self.inside[b]}
        nested = {c for b in removed for c in self.within[b]}
        of_width = sum(self.losses[n][w] for n, w in widths.items() if n not in gone)
        return of_width + sum(self.block_loss[b] for b in removed if b not in nested)

    def settle(self, price: float, start: State | None) -> State:
        """Groups and branches in turn, each at its best given the others, until none moves."""
        widths: dict[str, int] = {} if start is None else dict(start[0])
        removed = frozenset() if start is None else start[1]
        for _ in range(_SWEEPS):
            moved = False
            for g in self.found:
                if g.name not in self.costs.items_of or self.dead(g, removed):
                    continue
                best = self._best_width(g, price, widths, removed)
                if best != widths.get(g.name, g.size):
                    widths[g.name], moved = best, True
            for b in self.blocks:
                goes = self._goes(b, price, widths, removed)
                if goes != (b.name in removed):
                    removed, moved = removed ^ {b.name}, True
            if not moved:
                break
        return widths, removed

    def _best_width(self, g: Group, price: float, widths: dict[str, int], removed) -> int:
        candidates = self.widths[g.name]
        out = set().union(*(self.costs.gone[b] for b in removed))
        items = [i for i in self.costs.items_of[g.name] if i not in out]
        prices = [sum(self.costs.item(i, {**widths, g.name: w}) for i in items) for w in candidates]
        allowed = set(edges(candidates, prices))
        if price == float("inf"):
            return min((c, -w) for w, c in zip(candidates, prices, strict=True) if w in allowed)[1] * -1
        return min((self.losses[g.name][w] + price * c, -w) for w, c in zip(candidates, prices, strict=True) if w in allowed)[1] * -1

    def _goes(self, b: Branch, price: float, widths: dict[str, int], removed) -> bool:
        others = removed - {b.name}
        items = self.costs.gone[b.name] - set().union(*(self.costs.gone[o] for o in others))
        saved = sum(self.costs.item(i, widths) for i in items) - self.costs.added.get(b.name, 0.0)
        if price == float("inf"):
            return saved > 0
        return self.lost(widths, others | {b.name}) - self.lost(widths, others) < price * saved

    def fill(self, state: State, target: float) -> State:
        """Spends what is left of the budget: the step back that returns most importance for its cost, as long as one fits."""
        widths, removed = dict(state[0]), state[1]
        while True:
            total, lost = self.costs.total(widths, removed), self.lost(widths, removed)
            best = None
            for g in self.found:
                w = widths.get(g.name, g.size)
                if w == g.size or self.dead(g, removed):
                    continue
                wider = {**widths, g.name: min(x for x in self.widths[g.name] if x > w)}
                best = _better(best, wider, removed, lost - self.lost(wider, removed), self.costs.total(wider, removed) - total, target - total)
            for b in removed:
                fewer = removed - {b}
                best = _better(best, widths, fewer, lost - self.lost(widths, fewer), self.costs.total(widths, fewer) - total, target - total)
            if best is None:
                return widths, removed
            widths, removed = best[1]


def _better(best, widths, removed, gain: float, cost: float, room: float):
    if gain <= 0 or cost > room:
        return best
    rate = gain / max(cost, 1e-12)
    return (rate, (widths, removed)) if best is None or rate > best[0] else best

"""What to keep under a budget: the least importance lost for a cost (milliseconds, FLOPs, parameters), over width, heads and depth at once.

The items of this knapsack are not independent: a convolution's time depends on the widths of both its sides, and a branch takes its
widths along. So the budget becomes a price (dual.py), states are rounded from both sides of it (rounding.py), and beside the choice stands
how little any choice could lose. Only step edges are widths: of two widths that cost alike the wider one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.dual import Search
from whet.pruning.importance import step_of
from whet.pruning.rounding import steps
from whet.pruning.tables import Tables

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Choice:
    """Kept channels by group (of the groups that lose some), branches that go, cost before and after, importance lost.

    `bound` is what every choice within the target loses at least, as far as it is known; 0 says nothing. Where costs are measured it
    takes for granted that a layer gets no slower by getting narrower.
    """

    kept: Mapping[str, np.ndarray]
    removed: tuple[str, ...]
    before: float
    after: float
    lost: float
    bound: float = 0.0

    @property
    def gap(self) -> float:
        """How far the loss may be above the least possible one, as a share of that; infinite where no bound is known."""
        return self.lost / self.bound - 1 if self.bound > 0 else float("inf") if self.lost > 0 else 0.0


def widths_of(g: Group, multiple: int = 8, most: int = 12) -> list[int]:
    """Units that may be kept: whole multiples of `multiple` channels and the full size, at most `most` of them, widest last."""
    step = step_of(g, multiple)
    every = [n for n in range(step, g.size, step)]
    if len(every) >= most:
        every = [every[i] for i in np.linspace(0, len(every) - 1, most - 1).round().astype(int)]
    return [*every, g.size]


def edges(widths: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The step edges: widths (ascending) such that no wider one costs as little, within a hundredth."""
    falling = sorted(zip(widths, costs, strict=True), reverse=True)
    return [falling[n][0] for n in steps([c for _, c in falling])][::-1]


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
    before = costs.total({})
    if before <= target:
        return Choice({}, (), before, before, 0.0)
    tables = Tables(found, blocks, scores, costs, {g.name: widths_of(g, multiple, most) for g in found})
    best = Search(tables, target, progress).run()
    if best.x is None:
        raise PruneError(
            f"the target of {target:.4g} {costs.unit} is out of reach ({target / before:.2g} of what it is now): with the least of everything "
            f"{best.least:.4g} of {before:.4g} stay{', by the layers' + chr(39) + ' times' if costs.measured else ''}. "
            "Allow more (a smaller --multiple, fewer --skip), or another target."
        )
    widths, removed = tables.chosen(best.x)
    kept = {g: np.sort(np.argsort(-scores[g], kind="stable")[:w]) for g, w in widths.items()}
    return Choice(kept, removed, before, costs.total(widths, removed), tables.loss(best.x), best.bound)


def per_layer(found: Sequence[Group], blocks: Sequence[Branch], scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Normalised scores times the weights that a unit takes from: a channel of a residual stream is lost to every layer on it.

    A branch counts what its groups count together. Taylor terms need none of this: they are changes of one loss already.
    """
    made = {g.name: scores[g.name] * max(1, sum(t.type.rank > 1 for t, _, _ in g.weights())) for g in found}
    for b in blocks:
        own = [made[g.name].sum() for g in found if set(g.layers) <= set(b.layers)]
        made[b.name] = np.array([float(sum(own))]) if own else scores[b.name]
    return made

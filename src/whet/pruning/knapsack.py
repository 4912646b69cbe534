"""Selection under a budget: the smallest loss of importance for a cost (milliseconds, FLOPs, parameters) over width, heads and depth.

The items of this knapsack are dependent: the time of a convolution depends on the widths of its input and output, and a branch contains
widths. So the budget is relaxed with a Lagrange multiplier (dual.py), states are rounded from both sides (rounding.py), and the result comes
with a lower bound of the loss. Candidate widths are the edges of the latency staircase: of two widths with equal cost the wider one.
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
from whet.pruning.importance import get_step
from whet.pruning.rounding import find_steps
from whet.pruning.tables import Tables

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Choice:
    """Kept channels by affected group, removed branches, cost before and after, importance lost.

    `bound` is a lower bound of the loss within the target (0: unknown). For measured costs it assumes that a narrower layer is never
    slower.
    """

    kept: Mapping[str, np.ndarray]
    removed: tuple[str, ...]
    before: float
    after: float
    lost: float
    bound: float = 0.0

    @property
    def gap(self) -> float:
        """Upper bound of the relative optimality gap; infinite without a lower bound."""
        return self.lost / self.bound - 1 if self.bound > 0 else float("inf") if self.lost > 0 else 0.0


def list_widths(g: Group, multiple: int | None = 8, most: int = 12) -> list[int]:
    """Candidate unit counts: multiples of `multiple` channels and the full size, at most `most`, ascending. None: 8, but eighths of groups
    with fewer than 64 channels, which multiples of 8 would leave few widths."""
    step = get_step(g, multiple) if multiple is not None else min(get_step(g, 8), max(1, g.size // 8))
    every = [n for n in range(step, g.size, step)]
    if len(every) >= most:
        every = [every[i] for i in np.linspace(0, len(every) - 1, most - 1).round().astype(int)]
    return [*every, g.size]


def find_edges(widths: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The staircase edges: ascending widths for which no wider one costs the same (within 1 %)."""
    falling = sorted(zip(widths, costs, strict=True), reverse=True)
    return [falling[n][0] for n in find_steps([c for _, c in falling])][::-1]


def choose_within(
    channel_groups: Sequence[Group],
    blocks: Sequence[Branch],
    scores: Mapping[str, np.ndarray],
    costs: Costs,
    target: float,
    *,
    multiple: int | None = 8,
    most: int = 12,
    progress: Progress | None = None,
) -> Choice:
    """Selects the smallest loss at a total cost of at most `target` (in the unit of `costs`).

    `scores` are those of importance() for groups and branches. Raises PruneError when the target is unreachable or not positive.
    """
    if not target > 0:
        raise PruneError(f"the target must be positive (in {costs.unit}), not {target}")
    before = costs.total({})
    if before <= target:
        return Choice({}, (), before, before, 0.0)
    tables = Tables(channel_groups, blocks, scores, costs, {g.name: list_widths(g, multiple, most) for g in channel_groups})
    best = Search(tables, target, progress).run()
    if best.x is None:
        raise PruneError(
            f"the target of {target:.4g} {costs.unit} is unreachable ({target / before:.2g} of the present cost): with the smallest widths "
            f"{best.least:.4g} of {before:.4g} remain{', by the layers' + chr(39) + ' times' if costs.measured else ''}. "
            "Allow more (a smaller --multiple, fewer --skip), or another target."
        )
    widths, removed = tables.chosen(best.x)
    kept = {g: np.sort(np.argsort(-scores[g], kind="stable")[:w]) for g, w in widths.items()}
    return Choice(kept, removed, before, costs.total(widths, removed), tables.loss(best.x), best.bound)


def scale_by_weight_count(channel_groups: Sequence[Group], blocks: Sequence[Branch], scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Normalized scores times the number of weights that read or produce a unit: a residual-stream channel affects every layer on it.

    A branch counts the sum over its groups. Taylor terms are used unchanged: they are changes of one loss.
    """
    made = {g.name: scores[g.name] * max(1, sum(t.type.rank > 1 for t, _, _ in g.weights())) for g in channel_groups}
    for b in blocks:
        own = [made[g.name].sum() for g in channel_groups if set(g.layers) <= set(b.layers)]
        made[b.name] = np.array([float(sum(own))]) if own else scores[b.name]
    return made

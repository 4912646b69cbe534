"""From a candidate to a network: pruning, 2:4 sparsity, label-free recovery, fine-tuning; each step's result is recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from platformdirs import user_cache_dir

from whet.builder import BuildConfig
from whet.errors import WhetError
from whet.network import Network
from whet.pruning import (
    Group,
    PruneConfig,
    Recipe,
    RecoveryConfig,
    Target,
    advise_sparsity,
    apply_pattern,
    count_flops,
    count_params,
    cut,
    importance,
    make_pruning_recipe,
    prune,
    recover,
)
from whet.pruning.coupling import list_groups_for
from whet.pruning.importance import NEED_DATA, Samples
from whet.pruning.knapsack import Choice
from whet.pruning.order import check_order, note
from whet.pruning.stepwise import choose_stepwise
from whet.search.recipe.recipe import AutoRecipe, Effort, Width
from whet.search.recipe.space import Candidate, list_groups_to_keep
from whet.sparsity import find_reduction_axis, parse_pattern

Say = Callable[[str], None]
Rate = Callable[[Network], dict[str, Any]]  # a network -> its metric as plain data
TWO_FOUR = "two_four"  # key of a recipe's `about`: names of the layers with 2:4 weights


@dataclass
class Prepared:
    """The network to build, the pruning recipe (None: not pruned), and a row for each step."""

    network: Network
    recipe: Recipe | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variants: dict[int, Network] = field(default_factory=dict)  # networks that take another time than those before them, by the index of their step

    def add_step(self, name: str, start: float, rate: Rate | None, *, changes_time: bool = False) -> None:
        """Adds a row for a step that began at `start` (perf_counter) and gave `network`; `changes_time`: its shapes or its sparsity are new."""
        if changes_time:
            self.variants[len(self.steps)] = self.network
        row = {"step": name, "params": count_params(self.network), "flops": count_static_flops(self.network), "seconds": perf_counter() - start}
        self.steps.append(row | ({"metric": rate(self.network)} if rate is not None else {}))

    @property
    def metric(self) -> dict[str, Any]:
        """The metric of `network`, from the last step that was kept."""
        return next(s["metric"] for s in reversed(self.steps) if s.get("used", True))


def prepare_candidate(
    net: Network, candidate: Candidate, channel_counts: Mapping[str, int], data: Mapping[str, np.ndarray], effort: Effort,
    *, say: Say, rate: Rate | None = None, seed: int = 0, steps: int = 1, decided: Recipe | None = None,
) -> Prepared:  # fmt: skip
    """Prunes each group of `net` to its `channel_counts` most important channels and recovers it on `data` (inputs by name, no labels).

    With several `steps` the channels are chosen in that many cuts, each by scores of the network that was recovered after the one before.
    `decided` gives the channels instead of importance scores. `rate` scores the network after each step, for the report.
    Raises PruneError for an impossible cut.
    """
    result = Prepared(net)

    def step(name: str, start: float, *, changes_time: bool = False) -> None:
        result.add_step(name, start, rate, changes_time=changes_time)

    step("original", perf_counter())
    if candidate.pruned:
        start = perf_counter()
        say("pruning")
        coupled = list_groups_for(net, channel_counts if decided is None else decided.groups)
        check_order(net, "prune")
        if decided is not None:
            at = decided.kept()
        else:
            at = _choose_channels(net, candidate, coupled, channel_counts, data, RecoveryConfig(rows=effort.rows, seed=seed), steps)
        result.network = cut(net, at, coupled, removed=candidate.removed)
        more = {"steps": steps} if steps > 1 else {}
        note(result.network, "prune", by="whet auto", importance=candidate.importance, **more)
        info = {**more, "by": "whet auto", "importance": candidate.importance, "cut": dict(candidate.widths), "budget": candidate.budget}
        result.recipe = make_pruning_recipe(net, at, about=info, channel_groups=coupled, removed=candidate.removed)
        done_steps = ["channels pruned"] if at else []
        done_steps += [f"{len(candidate.removed)} residual branches removed"] if candidate.removed else []
        step(", ".join(done_steps) or "nothing to prune", start, changes_time=bool(done_steps))
        start = perf_counter()

        def tell(done: int, total: int, description: str) -> None:
            say(f"recovering {done}/{total}")

        result.network = recover(result.network, net, at, data, RecoveryConfig(rows=effort.rows, seed=seed), tell)
        note(result.network, "recover")
        step("recovered without labels", start)
    return result


def _choose_channels(
    net: Network, candidate: Candidate, coupled: Sequence[Group], channel_counts: Mapping[str, int], data: Mapping[str, np.ndarray],
    recovery: RecoveryConfig, steps: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The most important channels of each group of `net`, as many as `channel_counts` says (`coupled`: all groups), chosen in `steps` cuts."""
    sizes = {g.name: g.size for g in coupled}

    def select(present: Network, here: Sequence[Group], progress: float) -> Choice:
        chosen = [g for g in here if g.name in channel_counts]
        samples = Samples(data) if candidate.importance in NEED_DATA else None
        scores = importance(chosen, candidate.importance, recovery.seed, net=present, samples=samples)
        wanted = {name: round(sizes[name] - (sizes[name] - n) * progress) for name, n in channel_counts.items()}
        at = {g.name: np.sort(np.argsort(-scores[g.name], kind="stable")[: wanted[g.name]]) for g in chosen}
        return Choice(at, candidate.removed if present is net else (), 0.0, 0.0, 0.0)

    return choose_stepwise(net, coupled, select, steps, data, recovery)[0]


def write_two_four(result: Prepared, data: Mapping[str, np.ndarray], layers: Collection[str], *, say: Say, rate: Rate | None = None) -> None:
    """Writes 2:4 weights into `layers` of `result.network`, with a least-squares update on `data`, and their names into its recipe."""
    start = perf_counter()
    say("2:4")
    weighted = [x.name for x in result.network.layers if find_reduction_axis(x) is not None]
    written = [n for n in weighted if n in layers]
    recipe = result.recipe if result.recipe is not None else Recipe({})
    result.recipe = dataclasses.replace(recipe, about={**recipe.about, TWO_FOUR: written})
    result.notes.append(f"2:4 in {len(written)} of {len(weighted)} layers with weights: those that a sparse kernel makes faster here")
    if written:
        result.network = apply_pattern(result.network, parse_pattern("2:4", 0.0), data, skip=[n for n in weighted if n not in written]).network
    result.add_step("2:4", start, rate, changes_time=bool(written))


def list_two_four_gains(net: Network, config: BuildConfig, say: Say) -> list[str]:
    """The layers of `net` that are faster with 2:4 weights than any dense tactic, beyond the noise of the measurement."""
    advice = advise_sparsity(net, config, lambda done, total, _: say(f"2:4 {done}/{total}"))
    return [x.node for x in advice.layers if x.saved_ms > 0]


def fit_latency_budget(
    net: Network, candidate: Candidate, config: BuildConfig, recipe: AutoRecipe, data: Mapping[str, np.ndarray], *, say: Say
) -> tuple[dict[str, int], Candidate]:
    """Channels to keep by group and the candidate with its removed branches, chosen to fit a share of the layers' time.

    Layers are timed if the latency table (one per user and device, shared by all searches) has no row for them. Raises PruneError.
    """
    assert candidate.budget is not None
    width = recipe.space.width or Width()
    table = Path(user_cache_dir("whet")) / f"latency-table-{recipe.backend}.json"
    table.parent.mkdir(parents=True, exist_ok=True)
    pruning = PruneConfig(
        target=Target("latency", ratio=candidate.budget), importance=candidate.importance, multiple=width.multiple, depth=recipe.space.depth,
        seed=recipe.search.seed, build=config, table=str(table), engines=False, hidden=recipe.space.hidden,
        trials=recipe.space.budget_trials, recovery=RecoveryConfig() if recipe.space.budget_trials else None,
        skip=tuple(sorted(list_groups_to_keep(net, recipe.space))),
    )  # fmt: skip
    samples = data if candidate.importance in NEED_DATA or recipe.space.budget_trials else None
    pruned = prune(net, pruning, samples, progress=lambda done, total, _: say(f"latency budget {done}/{total}"))
    kept = {name: len(e.kept) for name, e in pruned.recipe.groups.items()}
    return kept, dataclasses.replace(candidate, removed=tuple(pruned.recipe.removed))


def count_static_flops(net: Network) -> int | None:
    """FLOPs at batch 1; None if a symbolic dimension cannot be 1."""
    try:
        return count_flops(net)
    except WhetError:
        return None


def has_zeros(net: Network) -> bool:
    """True if a weight of two or more axes holds zeros, which training with masks keeps."""
    return any(t.dtype.is_float and t.type.rank >= 2 and not t.array().all() for t in net.constants.values())

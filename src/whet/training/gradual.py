"""Gradual pruning: channels are cut in several steps during the training, with training between them.

After cut k of n, the share s * (1 - (1 - k / n)^3) of the cost is removed (cubic; Zhu and Gupta, "To prune, or not to prune", arXiv:1710.01878), or
s * k / n (linear); s is the share of the target. Every cut is selected by the importance in the network as trained so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from whet.errors import PruneError, TrainingError
from whet.network import Network
from whet.pruning import Group, Samples, cut, groups, importance
from whet.pruning.costs import COUNTED
from whet.pruning.cut import find_kept_indices
from whet.pruning.importance import COMPARABLE
from whet.pruning.knapsack import choose_within, scale_by_weight_count
from whet.pruning.stepwise import list_remaining_groups
from whet.training.batch_norms import InsertedBatchNorm, fold_weights, select_spread_samples
from whet.training.config import FinetuneConfig
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.module import NetworkModule, with_weights

_SAMPLES = 256  # samples that the importance is measured on
Indices = dict[tuple[str, int], np.ndarray]
"""Kept indices by weight name and axis."""


def compute_removed_share(schedule: str, done: int, steps: int) -> float:
    """The removed part of all that the schedule removes, after `done` of `steps` cuts (0..1)."""
    left = 1 - done / steps
    return 1 - left**3 if schedule == "cubic" else 1 - left


@dataclass(frozen=True)
class Change:
    """A cut of a module that was made: for each parameter and buffer, by state-dict name, the kept indices of its cut axes."""

    kept: Mapping[str, Sequence[tuple[int, np.ndarray]]]

    def cut_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The kept part of a tensor with the shape that parameter `name` had."""
        for axis, at in self.kept[name]:
            value = value.index_select(axis, torch.from_numpy(at).to(value.device))
        return value

    def cut_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The kept part of a state dict."""
        return {name: self.cut_tensor(name, value).clone() for name, value in state.items()}

    def carry_optimizer(self, before: Mapping[str, Mapping[str, Any]], optimizer: torch.optim.Optimizer, module: NetworkModule) -> None:
        """Gives `optimizer`, a new one of the cut module, the kept part of the old state: by parameter name, from before the cut."""
        for name, p in module.named_parameters():
            if name in before:
                optimizer.state[p] = {k: self._cut_value(name, v, p) for k, v in before[name].items()}

    def _cut_value(self, name: str, value: Any, p: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim != p.ndim or not p.ndim:
            return value  # a counter
        return torch.empty_like(p, dtype=value.dtype).copy_(self.cut_tensor(name, value))


def get_optimizer_state(module: NetworkModule, optimizer: torch.optim.Optimizer) -> dict[str, Mapping[str, Any]]:
    """The optimizer's state by parameter name."""
    return {name: dict(optimizer.state[p]) for name, p in module.named_parameters() if p in optimizer.state}


class GradualPruning:
    """The cuts of one training: `kept` are the units of each group of the original network that remain, `done` the number of cuts.

    `net` is the network as given, `student` its form in training (with `inserted` batch norms). Groups that only one of the two has stay whole.
    Raises PruneError for an unreachable target.
    """

    def __init__(
        self, net: Network, student: Network, inserted: Sequence[InsertedBatchNorm], data: TrainingData | Batches, config: FinetuneConfig,
        device: torch.device,
    ):  # fmt: skip
        target = config.prune_target()
        assert target is not None
        self.net, self.student, self.inserted, self.data, self.config, self.device = net, student, inserted, data, config, device
        inner = {g.name: g for g in groups(student)}
        self.groups = [g for g in groups(net) if g.name in inner and _are_equal(g, inner[g.name])]
        if not self.groups:
            raise PruneError(f"'{net.name}' has no channels that can be cut during a training. Leave out --pruneTo.")
        self._student_groups = [inner[g.name] for g in self.groups]
        self._costs = COUNTED[target.kind]
        costs = self._costs(net, self.groups, [])
        self._before = costs.total({})
        self._share = 1 - target.of(self._before)
        self._samples: Samples | None = None
        self.kept: dict[str, np.ndarray] = {}
        self.done = 0
        weights = scale_by_weight_count(self.groups, [], importance(self.groups, "l1", net=net))
        choose_within(self.groups, [], weights, costs, self._budget(config.prune_steps), multiple=None)  # raises if it is unreachable

    @property
    def ended(self) -> bool:
        """True after the last cut."""
        return self.done >= self.config.prune_steps

    def is_due(self, share: float) -> bool:
        """True if the next cut comes at progress `share` (0..1) of the training or before."""
        c = self.config
        return not self.ended and share >= c.prune_begin + (c.prune_end - c.prune_begin) * self.done / max(c.prune_steps - 1, 1)

    def cut_next(self, module: NetworkModule) -> Change | None:
        """Makes the next cut of `module`, in place; None if the previous cuts have removed enough already."""
        self.done += 1
        present = self._present(module)
        here = list_remaining_groups(self.groups, present, {name: len(at) for name, at in self.kept.items()})
        choice = choose_within(here, [], self._score(present, here), self._costs(present, here, []), self._budget(self.done), multiple=None)
        sizes, before = {g.name: g.size for g in self.groups}, self._indices()
        for name, at in choice.kept.items():
            self.kept[name] = self.kept.get(name, np.arange(sizes[name]))[at]
        return self._change(module, before) if choice.kept else None

    def cut_network(self) -> Network:
        """The network as given, with its own weights and the present cuts."""
        return cut(self.net, self.kept, self.groups)

    def to_json(self) -> dict[str, Any]:
        """The part of a checkpoint."""
        return {"done": self.done, "kept": {name: at.tolist() for name, at in self.kept.items()}}

    def restore(self, state: Mapping[str, Any], module: NetworkModule) -> None:
        """Makes the cuts of a checkpoint in `module`, a new one. Raises ValueError, TypeError, LookupError or PruneError for damaged values."""
        self.done, self.kept = int(state["done"]), {str(name): np.array(at, np.int64) for name, at in state["kept"].items()}
        if not 0 <= self.done <= self.config.prune_steps:
            raise ValueError(f"{self.done} cuts of {self.config.prune_steps}")
        self._change(module, {})

    def _budget(self, done: int) -> float:
        """The cost that may remain after `done` cuts."""
        return self._before * (1 - self._share * compute_removed_share(self.config.prune_schedule, done, self.config.prune_steps))

    def _present(self, module: NetworkModule) -> Network:
        """The network as given with the present cuts and trained weights."""
        return with_weights(self.cut_network(), fold_weights(module.weights(), self.inserted))

    def _score(self, present: Network, here: Sequence[Group]) -> dict[str, np.ndarray]:
        kinds: tuple[str, ...] = ("taylor2", "reconstruction") if self.config.prune_importance == "auto" else (self.config.prune_importance,)
        self._samples = self._samples or _read_samples(present, self.data, self.config, self.device)
        for kind in kinds:
            try:
                scores = importance(here, kind, self.config.seed, net=present, samples=self._samples)
            except PruneError:
                if kind == kinds[-1]:
                    raise
                continue  # an op without a gradient
            return scores if kind in COMPARABLE else scale_by_weight_count(here, [], scores)
        raise AssertionError("the last importance returns or raises")

    def _indices(self) -> Indices:
        found = find_kept_indices(self.student, self.kept, self._student_groups)
        return {(t.name, axis): at for (t, axis), at in found.items()}

    def _change(self, module: NetworkModule, before: Indices) -> Change:
        """Replaces the network of `module`, cut to the indices `before`, by the one cut to `kept`; values are copied."""
        after, names, state = self._indices(), module.weight_names(), module.state_dict()
        positions: dict[str, list[tuple[int, np.ndarray]]] = {path: [] for path in names}
        for path, name in names.items():
            for axis in range(state[path].ndim):
                at = after.get((name, axis))
                if at is not None:
                    positions[path].append((axis, np.searchsorted(before[name, axis], at) if (name, axis) in before else at))
        change = Change(positions)
        values = change.cut_state(state)
        module.replace_network(cut(self.student, self.kept, self._student_groups))
        if module.weight_names() != names:
            raise TrainingError("a cut has changed the trained weights of the network: prune it before the training, without --pruneTo")
        module.load_state_dict(values)
        return change


def _are_equal(a: Group, b: Group) -> bool:
    """True if the groups of two networks cut the same indices of the weights that both have."""
    own, other = ({(t.name, axis): at for t, axis, at in g.weights()} for g in (a, b))
    return a.size == b.size and all(np.array_equal(own[place], other[place]) for place in own.keys() & other.keys())


def _read_samples(net: Network, data: TrainingData | Batches, config: FinetuneConfig, device: torch.device) -> Samples:
    """Samples of the training data as the network reads them, with their labels if those are classes."""
    inputs: dict[str, list[np.ndarray]] = {t.name: [] for t in net.inputs}
    labels: list[np.ndarray] = []
    count = 0
    for feeds, given in Feeder(net, select_spread_samples(data, _SAMPLES), batch=config.batch, device=device).all():
        for name, x in feeds.items():
            inputs[name].append(x.float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy())
        if given is not None:
            labels.append(given.cpu().numpy())
        count += len(next(iter(feeds.values())))
        if count >= _SAMPLES:
            break
    joined = np.concatenate(labels) if labels else None
    classes = (
        joined is not None and joined.ndim == 1 and joined.dtype.kind in "iu" and net.outputs[0].type.rank == 2
        and config.distill < 1 and config.loss in ("auto", "cross_entropy")
    )  # fmt: skip
    return Samples({name: np.concatenate(parts) for name, parts in inputs.items()}, joined if classes else None)

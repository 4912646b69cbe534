"""The best state of a training by its error on a held-out part of the data; the state before the training is the first candidate.

A short training at too high a rate ends below the network that it started with. Differences on a small held-out part are partly chance, so a newer
state replaces the best one unless its error is larger by more than the standard error of the paired difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from whet.errors import TrainingError
from whet.training.config import FinetuneConfig
from whet.training.data import Batches, TrainingData
from whet.training.feeding import Feeder
from whet.training.loss import Loss, to_outputs
from whet.training.module import NetworkModule

MOST, FEWEST = 2048, 48  # samples of the held-out part: more cost time, fewer say nothing
_PARTS = 16  # batches that the loss is averaged over where there is no error per sample

State = dict[str, torch.Tensor]


def split_off_held_out(data: TrainingData | Batches, config: FinetuneConfig) -> tuple[TrainingData | Batches, TrainingData | None]:
    """Training part and held-out part (None: too few samples, user-defined batches, or `holdout` 0), drawn by the seed."""
    size = 0 if isinstance(data, Batches) else min(round(config.holdout * len(data)), MOST)
    if size < FEWEST or isinstance(data, Batches):
        return data, None
    order = np.random.default_rng([config.seed, size]).permutation(len(data))
    return data.part(np.sort(order[size:])), data.part(np.sort(order[:size]))


class BestState:
    """Keeps the state of a module with the smallest held-out error."""

    def __init__(
        self, module: NetworkModule, held_out: TrainingData, config: FinetuneConfig, loss_of: Loss, teacher: NetworkModule | None, channels_last: bool
    ):
        self.module, self.teacher, self.loss_of = module, teacher, loss_of
        device = next(p.device for p in module.parameters())
        labels = held_out.labels
        classes = config.distill < 1 and config.loss in ("auto", "cross_entropy") and labels is not None and labels.dtype.kind in "iu"
        self.by_sample = classes and labels is not None and labels.ndim == 1 and module.network.outputs[0].type.rank == 2
        batch = config.batch if self.by_sample else min(config.batch, max(len(held_out) // _PARTS, 1))
        fixed = any(isinstance(t.shape[0], int) for t in module.network.inputs if t.type.rank)
        batch = config.batch if fixed else batch
        self.feeder = Feeder(module.network, held_out, batch=batch, device=device, channels_last=channels_last)
        self.errors: list[float] = []  # of the state with the smallest mean, per sample or per batch
        self.state: State = {}
        self.epoch = -1  # epochs trained until the kept state; 0: none, -1: not judged yet

    def offer(self, epoch: int) -> float:
        """Judges the module's present state, keeps it unless it is clearly worse than the best; returns its mean error (or loss)."""
        errors = np.array([e for part in self._errors() for e in part])
        mean = float(errors.mean())
        if not np.isfinite(mean):
            return mean
        best = np.array(self.errors)
        if not len(best) or (errors - best).mean() <= _compute_standard_error(errors - best):
            self.state = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
            self.epoch = epoch
        if not len(best) or mean <= best.mean():
            self.errors = errors.tolist()
        return mean

    def forget(self) -> None:
        """Drops the kept state, which no longer fits the module."""
        self.errors, self.state, self.epoch = [], {}, -1

    def restore(self) -> None:
        """Copies the kept state into the module."""
        self.module.load_state_dict(self.state)

    def _errors(self) -> Iterator[list[float]]:
        training = self.module.training
        self.module.eval()
        with torch.no_grad():
            for feeds, labels in self.feeder.all():
                outputs = to_outputs(self.module(**feeds))
                if self.by_sample and labels is not None:
                    yield (outputs[0].argmax(1) != labels).double().tolist()
                    continue
                answers = None if self.teacher is None else to_outputs(self.teacher(**feeds))
                yield [float(self.loss_of(outputs, labels, answers))]
        self.module.train(training)

    def to_json(self) -> dict[str, object]:
        """The part of a checkpoint that is no tensor."""
        return {"epoch": self.epoch, "errors": self.errors}

    def read(self, data: Mapping[str, Any], state: State, *, may_be_empty: bool = False) -> None:
        """The inverse of to_json and `state`; `may_be_empty`: also directly after forget().

        Raises ValueError, TypeError or LookupError for damaged values."""
        errors = [float(e) for e in data["errors"]]
        epoch = int(data["epoch"])
        empty = may_be_empty and epoch < 0 and not state
        if not np.isfinite(errors).all() or (not empty and state.keys() != self.module.state_dict().keys()):
            raise ValueError("the held-out errors or the best state are damaged")
        self.epoch, self.errors = epoch, errors
        device = next(self.module.parameters()).device
        self.state = {n: t.to(device) for n, t in state.items()}


def _compute_standard_error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1) / len(differences) ** 0.5) if len(differences) > 1 else 0.0


def must_hold_out(data: TrainingData | Batches, config: FinetuneConfig) -> None:
    """Raises TrainingError for a held-out share that leaves nothing to train on."""
    if isinstance(data, TrainingData) and round(config.holdout * len(data)) >= len(data):
        raise TrainingError(f"holdout={config.holdout} leaves none of the {len(data)} samples for training: give a share below 1")

"""A teacher's answers, each asked for once: with views of the data (config.views) the same pictures come again, and so would the answers.

A teacher that is larger than what it teaches takes most of a step; asked once for each view, it may be many networks at the cost of few epochs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from whet.training.feeding import Feeder
from whet.training.loss import outputs_of
from whet.training.module import NetworkModule

_BATCHES = 4  # of training, in one of the teacher's, who keeps nothing for a way back


class _Autocast(Protocol):
    def __call__(self) -> AbstractContextManager: ...


class Answers:
    """What `teacher` says to each sample in each view of `feeder`; asked when a view comes for the first time."""

    def __init__(self, teacher: NetworkModule, feeder: Feeder, autocast: _Autocast):
        self.teacher, self.feeder, self.autocast = teacher, feeder, autocast
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def at(self, epoch: int, samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The answers to some samples (their numbers) as an epoch sees them, on the feeder's device; one tensor an output."""
        view = epoch % self.feeder.views
        if view not in self._kept:
            self._kept[view] = self._asked(view)
        return tuple(a[samples.to(a.device)].to(self.feeder.device, non_blocking=True) for a in self._kept[view])

    def _asked(self, view: int) -> tuple[torch.Tensor, ...]:
        fixed = any(isinstance(t.shape[0], int) for t in self.teacher.network.inputs if t.type.rank)
        said = []
        with torch.no_grad(), self.autocast():
            for feeds in self.feeder.view(view, self.feeder.batch * (1 if fixed else _BATCHES)):
                said.append(outputs_of(self.teacher(**feeds)))
        return tuple(self.feeder.placed(torch.cat(parts)) for parts in zip(*said, strict=True))

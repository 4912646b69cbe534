"""Cached teacher outputs: with a fixed number of augmented views (config.views) the same images, and so the same outputs, recur.

A large teacher takes most of a training step. Evaluated once per view, an ensemble of teachers costs as much as a few epochs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from whet.training.feeding import Feeder
from whet.training.loss import to_outputs
from whet.training.module import NetworkModule

_BATCHES = 4  # training batches per teacher batch: inference needs no memory for gradients


class _Autocast(Protocol):
    def __call__(self) -> AbstractContextManager: ...


class Answers:
    """Outputs of `teacher` for each sample in each view of `feeder`, computed when a view is first used."""

    def __init__(self, teacher: NetworkModule, feeder: Feeder, autocast: _Autocast):
        self.teacher, self.feeder, self.autocast = teacher, feeder, autocast
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def get_outputs(self, epoch: int, samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Teacher outputs for `samples` (indices) in the view of `epoch`, on the feeder's device; one tensor per output."""
        view = epoch % self.feeder.views
        if view not in self._kept:
            self._kept[view] = self._compute_view(view)
        return tuple(a[samples.to(a.device)].to(self.feeder.device, non_blocking=True) for a in self._kept[view])

    def _compute_view(self, view: int) -> tuple[torch.Tensor, ...]:
        fixed = any(isinstance(t.shape[0], int) for t in self.teacher.network.inputs if t.type.rank)
        outputs = []
        with torch.no_grad(), self.autocast():
            for feeds in self.feeder.view(view, self.feeder.batch * (1 if fixed else _BATCHES)):
                outputs.append(to_outputs(self.teacher(**feeds)))
        return tuple(self.feeder.place(torch.cat(parts)) for parts in zip(*outputs, strict=True))

"""The training loss: labels, distance to a teacher's outputs, or both."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from whet.errors import TrainingError
from whet.registry import import_user_function
from whet.training.config import FinetuneConfig


def to_outputs(result: Any) -> tuple[torch.Tensor, ...]:
    """A module's outputs as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


class Loss:
    """loss(outputs, labels, teacher outputs) = (1 - distill) * hard + distill * soft.

    hard: cross entropy for integer labels and logits [N, classes], otherwise mean squared error. soft (Hinton et al., arXiv:1503.02531):
    T^2 * KL divergence of the softened logits; for other outputs the mean squared error divided by the teacher's variance; or a user-defined
    function(outputs, teacher outputs) of all outputs, which gets one of them alone if the network has no others. The outputs after the
    first `outputs` are features (Romero et al., arXiv:1412.6550): `features` times the mean of their errors, each relative to its variance.
    """

    def __init__(self, config: FinetuneConfig, outputs: int | None = None):
        self.config, self.outputs = config, outputs
        self.own, self.own_soft = (
            import_user_function(source, flag) if source.startswith("python:") else None
            for source, flag in ((config.loss, "--loss"), (config.distill_loss, "--distillLoss"))
        )

    def __call__(self, outputs: tuple[torch.Tensor, ...], labels: torch.Tensor | None, teacher: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        share = self.config.distill
        total = torch.zeros((), device=outputs[0].device)
        outputs, features = outputs[: self.outputs], outputs[len(outputs[: self.outputs]) :]
        if features:
            assert teacher is not None
            teacher, wanted = teacher[: len(outputs)], teacher[len(outputs) :]
            distances = [self.relative(a.float(), b.float()) for a, b in zip(features, wanted, strict=True)]
            total = total + self.config.features * sum(distances) / len(distances)
        if share < 1:
            if labels is None:
                raise TrainingError("there are no labels: give them with the data, or distill from the original alone (distill=1)")
            total = total + (1 - share) * self.hard(outputs, labels)
        if share > 0:
            if teacher is None:
                raise TrainingError("distillation needs a teacher: the network before it was pruned")
            total = total + share * self.distance(outputs, teacher)
        return total

    def distance(self, outputs: tuple[torch.Tensor, ...], teacher: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The distillation loss."""
        if self.own_soft is None:
            return sum(self.soft(a.float(), b.float()) for a, b in zip(outputs, teacher, strict=True)) / len(outputs)
        mine, theirs = (tuple(t.float() for t in some) for some in (outputs, teacher))
        return self.own_soft(mine, theirs) if len(mine) > 1 else self.own_soft(mine[0], theirs[0])

    def hard(self, outputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
        """The label loss."""
        if self.own is not None:
            return self.own(outputs if len(outputs) > 1 else outputs[0], labels)
        y = outputs[0].float()
        whole = not labels.is_floating_point()
        if self.config.loss == "cross_entropy" or (self.config.loss == "auto" and whole):
            if y.ndim < 2 or labels.ndim != y.ndim - 1:
                raise TrainingError(f"cross entropy takes logits [N, classes, ...] and labels [N, ...], not {list(y.shape)} and {list(labels.shape)}")
            try:
                return F.cross_entropy(y, labels.long(), label_smoothing=self.config.label_smoothing)
            except IndexError as e:  # on a CPU; on a GPU the process would end
                raise TrainingError(f"labels go from {labels.min()} to {labels.max()}, and the output has {y.shape[1]} classes: {e}") from e
        if y.shape != labels.shape:
            shapes = f"the first output is {list(y.shape)}, its labels are {list(labels.shape)}"
            raise TrainingError(f"{shapes}: give a user-defined loss (python:module:function)")
        return F.mse_loss(y, labels.float())

    def soft(self, y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """The distillation loss of one output."""
        if y.ndim == 2 and self.config.loss != "mse":
            t = self.config.temperature
            return F.kl_div(F.log_softmax(y / t, 1), F.log_softmax(want / t, 1), reduction="batchmean", log_target=True) * t * t
        return self.relative(y, want)

    @staticmethod
    def relative(y: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """The mean squared error divided by the variance of `want`."""
        return F.mse_loss(y, want) / want.var().clamp_min(1e-8)

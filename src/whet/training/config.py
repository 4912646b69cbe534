"""What fine-tuning is told; `whet finetune` reads its flags off these fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from whet.errors import UsageError

PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw")
MASKS = ("", "2:4", "zeros")
LOSSES = ("auto", "cross_entropy", "mse")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Defaults suit a pruned convolutional network: SGD with Nesterov momentum, cosine schedule with warm-up."""

    epochs: float = 10.0  # passes over the data; a fraction is allowed
    seconds: float = 0.0  # stop here at the latest and fit the schedule to it (0: no limit); a time limit is not repeatable bit by bit
    batch: int = 128  # samples a step
    lr: float = 0.02  # the highest learning rate
    warmup: float = 0.05  # share of all steps in which the rate rises from 0
    last_lr: float = 0.0  # share of `lr` that the cosine ends at
    optimizer: str = "sgd"  # sgd | adamw
    momentum: float = 0.9
    weight_decay: float = 5e-4  # not on vectors (biases, norms)
    clip: float = 0.0  # largest norm of the whole gradient; 0: not clipped
    precision: str = "fp32"  # fp32 | bf16 | fp16: what autocast computes in; weights stay fp32
    loss: str = "auto"  # auto | cross_entropy | mse | python:module:function(outputs, labels)
    label_smoothing: float = 0.0
    distill: float = 0.0  # share of the loss that is the distance to the teacher's outputs; 1: no labels needed
    temperature: float = 4.0  # of the distillation of classifiers
    views: int = 0  # augmented forms of each sample that are used in turns, the teacher's answer to each kept; 0: a new one at every step
    masks: str = ""  # what is held: "" nothing, 2:4 (made by magnitude where there is none), zeros (those that are there)
    freeze_batch_norm: bool = False  # keep the statistics as they are
    augment: str = ""  # crop:N (pad by N, cut at random), flip (left and right), cutmix:PERCENT (with distill=1); comma between
    device: str = "auto"  # auto | cpu | cuda | cuda:1 ...
    channels_last: bool | None = None  # None: on CUDA for 4-dimensional inputs
    graph: bool | None = None  # a step as one CUDA graph; None: on CUDA where it can be one (not in fp16, not with a loss of your own)
    compile: bool = False  # torch.compile fuses what lies between convolutions: up to a minute before the first steps, shorter steps after
    seed: int = 0
    checkpoint: str = ""  # file (.safetensors) that a killed training goes on from
    checkpoint_seconds: float = 60.0  # between two checkpoints; 0: after every step
    freeze: tuple[str, ...] = ()  # patterns of weights that stay
    train: tuple[str, ...] = ()  # patterns of constants that are trained though their op does not say so

    def __post_init__(self) -> None:
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("masks", MASKS)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is one of {', '.join(k or '(none)' for k in known)}, not {getattr(self, name)!r}")
        if self.loss not in LOSSES and not self.loss.startswith("python:"):
            raise UsageError(f"loss is one of {', '.join(LOSSES)} or python:MODULE:FUNCTION, not {self.loss!r}")
        for name, low, high in (("distill", 0, 1), ("warmup", 0, 1), ("last_lr", 0, 1), ("label_smoothing", 0, 1), ("momentum", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name} is from {low} to {high}, not {getattr(self, name)}")
        for name in ("lr", "temperature", "batch"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is above 0, not {getattr(self, name)}")
        if "cutmix" in self.augment and self.distill < 1:
            raise UsageError("a picture with a part of another has no label of its own: cutmix needs distill=1, where the teacher alone is followed")
        if self.views < 0:
            raise UsageError(f"views is 0 or more, not {self.views}")
        if not self.epochs > 0:
            raise UsageError(f"epochs is above 0, not {self.epochs}")

    def settings(self) -> dict[str, Any]:
        """What decides the numbers (not where checkpoints lie, nor how long one may take)."""
        kept = asdict(self)
        for name in ("checkpoint", "checkpoint_seconds", "device", "graph"):
            kept.pop(name)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}

"""Options of fine-tuning; the flags of `whet finetune` are generated from these fields."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from whet.errors import PruneError, UsageError

if TYPE_CHECKING:
    from whet.pruning.target import Target

PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw")
MASKS = ("", "2:4", "zeros")
BATCH_NORMS = ("insert", "keep")
LOSSES = ("auto", "cross_entropy", "mse")
SCHEDULES = ("cubic", "linear")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Defaults suit a pruned convolutional network: SGD with Nesterov momentum, cosine schedule with warm-up."""

    epochs: float = 10.0  # passes over the data; a fraction is allowed
    seconds: float = 0.0  # time limit that the schedule is fitted to (0: none); results under a time limit are not reproducible bit by bit
    batch: int = 128  # samples per step
    lr: float = 0.02  # the highest learning rate
    warmup: float = 0.05  # share of all steps with a linearly rising rate
    last_lr: float = 0.0  # final learning rate as a share of `lr`
    optimizer: str = "sgd"  # sgd | adamw
    momentum: float = 0.9
    weight_decay: float = 5e-4  # not on vectors (biases, norms)
    clip: float = 0.0  # largest global gradient norm; 0: no clipping
    precision: str = "fp32"  # fp32 | bf16 | fp16: autocast precision; weights stay fp32
    loss: str = "auto"  # auto | cross_entropy | mse | python:module:function(outputs, labels)
    label_smoothing: float = 0.0
    distill: float = 0.0  # share of the distillation loss (distance to the teacher's outputs); 1: no labels needed
    distill_loss: str = "auto"  # auto (see training/loss.py) | python:module:function(outputs, the teacher's outputs): for detectors, for example
    temperature: float = 4.0  # softmax temperature of the distillation of classifiers
    views: int = 0  # number of augmented views per sample, used cyclically with cached teacher outputs; 0: a new view at every step
    masks: str = ""  # fixed zeros: "" none, 2:4 (by magnitude where there is no pattern), zeros (the existing ones)
    freeze_batch_norm: bool = False  # do not update batch-norm statistics
    batch_norms: str = "insert"  # insert (after convolutions of exports without them; folded after the training) | keep
    holdout: float = 0.05  # share of the samples (48 to 2,048, else none) that the best epoch is selected on; 0: the last one is kept
    ema: float = 0.0  # decay of an exponential moving average of the weights, which is the result; 0: none
    accumulate: int = 1  # batches whose gradients are added before a step of the optimizer
    features: float = 0.0  # weight of the distance to the teacher's features: sums of residual branches with equal shape
    log: str = ""  # FILE.csv, or a folder for TensorBoard: one row per epoch
    augment: str = ""  # comma-separated: crop:N (pad by N, random crop), flip (horizontal), cutmix:PERCENT (with distill=1)
    device: str = "auto"  # auto (a GPU if there is one) | cpu | cuda | cuda:1 ...
    channels_last: bool | None = None  # None: on CUDA for 4-dimensional inputs
    graph: bool | None = None  # one CUDA graph per step; None: on CUDA where possible (not in fp16, not with a user-defined loss)
    compile: bool = False  # torch.compile fuses elementwise layers: up to a minute of compilation, then shorter steps
    prune_to: str = ""  # gradual pruning: flops=0.6x, params=0.5x or channels=0.7x of the given network remain; "": none
    prune_steps: int = 8  # cuts until `prune_to` is reached
    prune_schedule: str = "cubic"  # cubic (large cuts first) | linear: share that is removed after each cut
    prune_begin: float = 0.0  # share of the training before the first cut
    prune_end: float = 0.5  # share of the training before the last cut; the rest trains the final network
    prune_importance: str = "auto"  # as for `whet prune`; auto: taylor2, or reconstruction where an op has no gradient
    seed: int = 0
    checkpoint: str = ""  # file (.safetensors) that an interrupted training resumes from
    checkpoint_seconds: float = 60.0  # seconds between checkpoints; 0: after every step
    freeze: tuple[str, ...] = ()  # name patterns of weights to freeze
    train: tuple[str, ...] = ()  # name patterns of additional constants to train

    def __post_init__(self) -> None:
        choices = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "masks": MASKS, "batch_norms": BATCH_NORMS, "prune_schedule": SCHEDULES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UsageError(f"{name} is one of {', '.join(k or '(none)' for k in known)}, not {getattr(self, name)!r}")
        if self.loss not in LOSSES and not self.loss.startswith("python:"):
            raise UsageError(f"loss is one of {', '.join(LOSSES)} or python:MODULE:FUNCTION, not {self.loss!r}")
        if self.distill_loss != "auto" and not self.distill_loss.startswith("python:"):
            raise UsageError(f"distill_loss is auto or python:MODULE:FUNCTION, not {self.distill_loss!r}")
        for name in ("distill", "warmup", "last_lr", "label_smoothing", "momentum", "holdout"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is from 0 to 1, not {getattr(self, name)}")
        for name in ("lr", "temperature", "batch"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is above 0, not {getattr(self, name)}")
        if "cutmix" in self.augment and self.distill < 1:
            raise UsageError("CutMix images have no label: cutmix needs distill=1, where only the teacher's outputs are used")
        if not 0 <= self.ema < 1:
            raise UsageError(f"ema is from 0 to below 1, not {self.ema}")
        if self.accumulate < 1:
            raise UsageError(f"accumulate is 1 or more, not {self.accumulate}")
        if self.features < 0:
            raise UsageError(f"features is 0 or more, not {self.features}")
        if self.views < 0:
            raise UsageError(f"views is 0 or more, not {self.views}")
        if not self.epochs > 0:
            raise UsageError(f"epochs is above 0, not {self.epochs}")
        if self.prune_steps < 1:
            raise UsageError(f"prune_steps is 1 or more, not {self.prune_steps}")
        if not 0 <= self.prune_begin <= self.prune_end < 1:
            raise UsageError(f"0 <= prune_begin <= prune_end < 1, not {self.prune_begin} and {self.prune_end}")
        if self.prune_to and self.masks:
            raise UsageError("prune_to cuts channels, which moves the zeros of masks: prune first, then train with masks")
        self.prune_target()

    def prune_target(self) -> Target | None:
        """The target of `prune_to`, None without one. Raises UsageError."""
        if not self.prune_to:
            return None
        from whet.pruning.importance import KINDS
        from whet.pruning.target import Target

        if self.prune_importance not in ("auto", *KINDS) and not self.prune_importance.startswith("python:"):
            raise UsageError(f"prune_importance is auto, {', '.join(KINDS)} or python:MODULE:FUNCTION, not {self.prune_importance!r}")
        kind, _, amount = self.prune_to.partition("=")
        if kind not in ("flops", "params", "channels"):
            raise UsageError(f"prune_to is flops=, params= or channels= with an amount, as flops=0.6x, not {self.prune_to!r}. For a latency, "
                             "use `whet prune --latency` and then fine-tune.")  # fmt: skip
        try:
            return Target.parse(kind, amount)
        except PruneError as e:
            raise UsageError(f"prune_to={self.prune_to}: {e}") from None

    def settings(self) -> dict[str, Any]:
        """The options that determine the result (not checkpoint paths or time limits)."""
        kept = asdict(self)
        for name in ("checkpoint", "checkpoint_seconds", "device", "graph", "log"):
            kept.pop(name)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}

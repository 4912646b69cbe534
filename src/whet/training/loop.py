"""The training loop: steps, schedule, mixed precision, checkpoints, bit-exact resumption."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from whet.errors import PruneError, TrainingError
from whet.training.answers import Answers
from whet.training.average import Average
from whet.training.best_state import BestState, must_hold_out, split_off_held_out
from whet.training.checkpoint import load_checkpoint, must_match, read_state, save_checkpoint
from whet.training.config import FinetuneConfig
from whet.training.data import Batches, TrainingData
from whet.training.distributed import Workers, copy_state_to_all, join_process_group, wrap_module
from whet.training.evaluate import accuracy
from whet.training.feeding import Feeder
from whet.training.gradual import GradualPruning, get_optimizer_state
from whet.training.graphed import GraphedStep, can_be_graphed
from whet.training.log import open_log
from whet.training.loss import Loss, to_outputs
from whet.training.module import NetworkModule

Progress = Callable[[int, int, str], None]
"""progress(steps done, total steps, message)"""

_LOOK = 20  # steps between two reads of the loss, each of which synchronizes with the device


def rate(config: FinetuneConfig, share: float) -> float:
    """The learning rate at progress `share` (0..1): linear warm-up, then cosine decay (Loshchilov and Hutter, arXiv:1608.03983)."""
    if share < config.warmup:
        return config.lr * share / config.warmup
    through = min((share - config.warmup) / max(1 - config.warmup, 1e-12), 1.0)
    return config.lr * (config.last_lr + (1 - config.last_lr) * (1 + math.cos(math.pi * through)) / 2)


def make_optimizer(module: NetworkModule, config: FinetuneConfig, graphed: bool = False) -> torch.optim.Optimizer:
    """SGD (Nesterov) or AdamW with weight decay on matrices only. `graphed`: capturable, with the learning rate as a device tensor."""
    every = [p for p in module.parameters() if p.requires_grad]
    if not every:
        raise TrainingError("there is nothing to train: every weight is frozen")
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    lr: Any = torch.tensor(config.lr, device=every[0].device) if graphed else config.lr
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(config.momentum, 0.999), **({"fused": True, "capturable": True} if graphed else {}))
    return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.momentum > 0, **({"fused": True} if graphed else {}))


@dataclass(frozen=True)
class Fitted:
    """History per epoch, steps, the step of the checkpoint that was resumed (0: none), and the epochs of the returned state (0: the state before
    the training; None: nothing was held out, it is the last one)."""

    history: list[dict[str, float]]
    steps: int
    resumed_at: int
    kept_epoch: int | None


def fit(
    module: NetworkModule,
    data: TrainingData | Batches,
    config: FinetuneConfig,
    *,
    teacher: NetworkModule | None = None,
    test: TrainingData | Batches | None = None,
    progress: Progress | None = None,
    digest: str = "",
    outputs: int | None = None,
    gradual: GradualPruning | None = None,
) -> Fitted:
    """Trains the module in place, with the cuts of `gradual`; outputs after the first `outputs` are features. Raises TrainingError."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    processes = join_process_group(config, device)
    if processes.count > 1:
        config = replace(config, graph=False, compile=False)
    now = {"model": digest, "data": data.describe(), "settings": config.settings()}
    if gradual is not None and config.checkpoint and os.path.exists(config.checkpoint):
        _repeat_cuts(config.checkpoint, now, gradual, module)
    optimizer = make_optimizer(module, config, can_be_graphed(config, device))
    last = config.channels_last if config.channels_last is not None else device.type == "cuda"
    if last:
        module.to(memory_format=torch.channels_last)
        if teacher is not None:
            teacher.to(memory_format=torch.channels_last)
    log = open_log(config.log) if processes.first else None
    must_hold_out(data, config)
    data, held = split_off_held_out(data, config)
    feeder = Feeder(module.network, data, batch=config.batch, device=device, augment=config.augment, seed=config.seed, channels_last=last,
                    views=config.views, workers=processes)  # fmt: skip
    loss_of = Loss(config, outputs)
    best = None if held is None else BestState(module, held, config, loss_of, teacher, last)
    run = _Run(module, config, optimizer, feeder, teacher, device, loss_of, best, processes, gradual, last)
    kept = None if teacher is None or not config.views else Answers(teacher, feeder, run.autocast)
    if config.checkpoint and os.path.exists(config.checkpoint):
        try:
            state, copies = load_checkpoint(config.checkpoint, module, run.optimizer, ("best", "average"))
            must_match(config.checkpoint, state, now)
            run.restore(state, copies)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as e:
            why = f"{type(e).__name__}: {str(e)[:200]}"
            raise TrainingError(f"the checkpoint {config.checkpoint} is damaged ({why}). Delete it to start over.") from e
    elif best is not None:
        best.offer(0)
    resumed = run.step
    saved = time.perf_counter()

    def save() -> None:
        if config.checkpoint and processes.first:
            save_checkpoint(config.checkpoint, module, run.optimizer, {**now, **run.state()}, run.copies())

    while not run.over():
        epoch, start = divmod(run.step, feeder.steps)
        for feeds, labels, samples in feeder.epoch(epoch, start):
            run.cut_if_due()
            run.train_step(feeds, labels, () if kept is None or samples is None else kept.get_outputs(epoch, samples))
            if progress is not None and processes.first and (run.step % _LOOK == 0 or run.over()):
                progress(run.step, run.total, f"epoch {epoch + 1}, loss {run.loss():.3f}")
            if run.over():
                break
            if config.checkpoint and not run.accumulated and time.perf_counter() - saved >= config.checkpoint_seconds:
                save()
                saved = time.perf_counter()
        run.close_epoch(epoch, None if test is None else lambda: accuracy(module, test, batch=config.batch))
        if log is not None:
            log(run.history)
        save()
    run.cut_rest()
    run.finish()
    return Fitted(run.history, run.step, resumed, None if best is None else best.epoch)


def _repeat_cuts(path: str, now: dict[str, Any], gradual: GradualPruning, module: NetworkModule) -> None:
    """Cuts the module as the one of the checkpoint `path` is cut. Raises TrainingError."""
    state = read_state(path)
    try:
        must_match(path, state, now)
        gradual.restore(state["gradual"], module)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, PruneError) as e:
        why = f"{type(e).__name__}: {str(e)[:200]}"
        raise TrainingError(f"the checkpoint {path} is damaged ({why}). Delete it to start over.") from e


class _Run:
    """The mutable state of a training run, and its part in a checkpoint."""

    def __init__(self, module: NetworkModule, config: FinetuneConfig, optimizer: torch.optim.Optimizer, feeder: Feeder,
                 teacher: NetworkModule | None, device: torch.device, loss_of: Loss, best: BestState | None, processes: Workers,
                 gradual: GradualPruning | None = None, channels_last: bool = False):  # fmt: skip
        self.module, self.config, self.optimizer, self.feeder, self.teacher, self.device = module, config, optimizer, feeder, teacher, device
        self.loss_of, self.best, self.processes, self.gradual, self.channels_last = loss_of, best, processes, gradual, channels_last
        self.average = Average(module, config.ema) if config.ema else None
        self.accumulated = 0  # batches whose gradients wait for a step of the optimizer
        self.total = max(round(config.epochs * feeder.steps), 1)
        self.step = 0
        self.spent = 0.0
        self.history: list[dict[str, float]] = []
        self._began = time.perf_counter()
        self._sum, self._count = torch.zeros((), device=device), 0
        self._moves = True  # the present batch ends with a step of the optimizer
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self._prepare_steps()

    def _prepare_steps(self) -> None:
        """Compiles the current module for training steps, and records their CUDA graph again at the next step."""
        self._student: Callable[..., Any] = wrap_module(self.module, self.device, self.processes)
        self._moved = GraphedStep(self._move) if can_be_graphed(self.config, self.device) else self._move

    def elapsed(self) -> float:
        """Seconds of training, including those before a resumption."""
        return self.spent + time.perf_counter() - self._began

    def share(self) -> float:
        """Progress 0..1: by steps, or by time when that is limited."""
        by_time = self.elapsed() / self.config.seconds if self.config.seconds else 0.0
        return min(max(self.step / self.total, by_time), 1.0)

    def over(self) -> bool:
        """True after the last step."""
        return self.step >= self.total or (self.config.seconds > 0 and self.elapsed() >= self.config.seconds)

    def cut_if_due(self) -> None:
        """Makes the cuts that are due before the next step, unless gradients wait for a step of the optimizer."""
        while self.gradual is not None and not self.accumulated and self.gradual.is_due(self.share()):
            self._cut()

    def cut_rest(self) -> None:
        """Makes the cuts that a time limit or waiting gradients have left."""
        cuts = self.gradual is not None and not self.gradual.ended
        while self.gradual is not None and not self.gradual.ended:
            self._cut()
        if cuts and self.best is not None:
            self.best.forget()
            self.best.offer(len(self.history))

    def _cut(self) -> None:
        """Makes one cut. The optimizer's state and the moving average keep the entries of the remaining weights; the best state is reset."""
        assert self.gradual is not None
        old = get_optimizer_state(self.module, self.optimizer)
        change = self.gradual.cut_next(self.module)
        if change is None:
            return
        if self.channels_last:
            self.module.to(memory_format=torch.channels_last)
        self.optimizer = make_optimizer(self.module, self.config, can_be_graphed(self.config, self.device))
        change.carry_optimizer(old, self.optimizer, self.module)
        if self.average is not None:
            self.average.state = change.cut_state(self.average.state)
        if self.best is not None:
            self.best.forget()
        self._prepare_steps()

    def train_step(self, feeds: dict[str, torch.Tensor], labels: torch.Tensor | None, answers: tuple[torch.Tensor, ...] = ()) -> None:
        """One optimizer step. `answers` are cached teacher outputs; without them the teacher runs."""
        self.module.train()
        if self.config.freeze_batch_norm:
            self.module.eval()
        now = rate(self.config, self.share())
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        last = (self.step + 1) % self.feeder.steps == 0 or self.step + 1 >= self.total
        self._moves = last or self.accumulated + 1 == self.config.accumulate
        self._sum += self._moved(feeds, labels, answers)
        self.step += 1
        self._count += 1
        self.accumulated = 0 if self._moves else self.accumulated + 1
        if self.average is not None and self._moves:
            self.average.update(self.step)
        if self.step % _LOOK == 0 or self.step == 1:
            self.loss()

    def _move(self, feeds: dict[str, torch.Tensor], labels: torch.Tensor | None, answers: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        """Forward pass, backward pass and weight update; returns the loss."""
        with self.autocast():
            if self.teacher is not None and not answers:
                with torch.no_grad():
                    answers = to_outputs(self.teacher(**feeds))
            outputs = to_outputs(self._student(**feeds))
            if self.config.compile and self._student is self.module:  # the first step has bound the shapes
                self._student = torch.compile(self.module, dynamic=False)
        loss = self.loss_of(outputs, labels, answers or None)
        if not self.accumulated:
            self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss / self.config.accumulate).backward()
        if not self._moves:
            return loss.detach()
        if self.config.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def autocast(self) -> Any:
        """The autocast context of the configured precision."""
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.config.precision == "bf16" else torch.float16)

    def loss(self) -> float:
        """The mean loss of the current epoch. Raises TrainingError when it is not finite."""
        found = float(self._sum) / max(self._count, 1)
        if not math.isfinite(found):
            raise TrainingError(
                f"the loss is {found} at step {self.step}: lower lr (now {self.config.lr:g}), clip the gradient (clip=1), or train in fp32 "
                "or bf16. The last checkpoint, if any, is older."
            )
        return found

    def close_epoch(self, epoch: int, judge: Callable[[], float] | None) -> None:
        """Judges the state (the average, if there is one) and appends the epoch to the history."""
        line = {"epoch": epoch + 1, "step": self.step, "loss": self.loss(), "lr": rate(self.config, self.share()), "seconds": self.elapsed()}
        with nullcontext() if self.average is None else self.average.apply_average():
            if self.best is not None:
                line["held_out"] = self.best.offer(epoch + 1)
            if judge is not None:
                line["accuracy"] = judge()
        self.history.append(line)
        self._sum, self._count = torch.zeros((), device=self.device), 0

    def finish(self) -> None:
        """Copies the resulting state into the module: the best one, or the average."""
        if self.best is not None:
            self.best.restore()
        elif self.average is not None:
            self.module.load_state_dict(self.average.state)
        copy_state_to_all(self.module, self.processes)

    def copies(self) -> dict[str, dict[str, torch.Tensor]]:
        """The further states of the module that a checkpoint stores."""
        return {**({} if self.best is None else {"best": self.best.state}), **({} if self.average is None else {"average": self.average.state})}

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores in addition to tensors."""
        return {
            "step": self.step, "seconds": self.elapsed(), "history": self.history, "scaler": self.scaler.state_dict(),
            "loss": [float(self._sum), self._count], "best": None if self.best is None else self.best.to_json(),
            **({} if self.gradual is None else {"gradual": self.gradual.to_json()}),
        }  # fmt: skip

    def restore(self, state: dict[str, Any], copies: dict[str, dict[str, torch.Tensor]]) -> None:
        """The inverse of state() and copies(). Raises ValueError, TypeError or LookupError for values that state() does not give."""
        self.step, self.spent, self.history = int(state["step"]), float(state["seconds"]), [dict(line) for line in state["history"]]
        numbers = [self.step, self.spent, *(v for line in self.history for v in line.values())]
        if self.step < 0 or not all(isinstance(v, int | float) and math.isfinite(v) for v in numbers):
            raise ValueError("step, seconds or history are no finite numbers from 0")
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.best is not None:
            self.best.read(state["best"], copies["best"], may_be_empty=self.gradual is not None and self.step < self.total)
        if self.average is not None:
            self.average.read(copies["average"])
        self._sum, self._count = torch.tensor(state["loss"][0], device=self.device), int(state["loss"][1])

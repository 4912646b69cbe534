"""finetune(): trains a source network on labels, a teacher's outputs, or both, and returns a source network."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from whet.errors import TrainingError, UsageError
from whet.network import Network
from whet.passes import Phase, run_passes, select
from whet.pruning.order import check_order, note
from whet.pruning.recipe import Recipe, make_pruning_recipe
from whet.registry import import_user_function
from whet.training.batch_norms import InsertedBatchNorm, fold_weights, insert_batch_norms
from whet.training.config import FinetuneConfig
from whet.training.data import Batches, TrainingData
from whet.training.distributed import read_workers
from whet.training.evaluate import accuracy
from whet.training.features import mark_features
from whet.training.free_batch import free_batch
from whet.training.gradual import GradualPruning
from whet.training.loop import Fitted, Progress, fit
from whet.training.masks import hold, make_masks, reapply
from whet.training.module import NetworkModule, with_weights


@dataclass(frozen=True)
class Finetuned:
    """The trained network and its history: loss, seconds and accuracy on `test` (if given) per epoch."""

    network: Network
    history: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    resumed_at: int = 0  # step of the checkpoint that was resumed; 0: none
    accuracy: float | None = None  # of the returned network on `test`
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)  # fixed zeros: bool by weight name, False for a zero
    kept_epoch: int | None = None  # epochs of the returned state; 0: none was better than the network before; None: nothing was held out
    inserted: int = 0  # batch norms that were inserted for the training
    cuts: Recipe | None = None  # channels that gradual pruning has kept

    @property
    def masked_weights(self) -> int:
        """Number of masked weights."""
        return len(self.masks)


def finetune(
    net: Network,
    data: TrainingData | Batches,
    config: FinetuneConfig | None = None,
    *,
    teacher: Network | None = None,
    test: TrainingData | Batches | None = None,
    progress: Progress | None = None,
    train: str | Callable[..., Any] | None = None,
    insist: bool = False,
) -> Finetuned:
    """Trains a copy of `net` (source stage; batch norms not folded, best).

    `teacher` is the network for the distillation loss, usually the one before pruning. A final Softmax is removed during training, so that
    losses see logits; batch norms that the exporter has folded are inserted for the training and folded again. `train` is a user function (or
    python:module:function) called as train(module, data, config) instead of whet's loop; masks are kept in any case. `insist` trains although the
    network is quantized.
    Raises TrainingError, UnsupportedError (an op that cannot be trained), UsageError (settings), PruneError (the order of steps).
    """
    config = config or FinetuneConfig()
    check_order(net, "finetune", insist)
    if config.prune_to:
        check_order(net, "prune", insist)
        if train is not None or read_workers().count > 1:
            raise UsageError("prune_to works in one process and with whet's own loop: leave out --train and torchrun, or prune before the training")
    device = select_device(config.device)
    student, answers = free_batch(without_softmax(net), data, config.batch, device), None
    inserted: list[InsertedBatchNorm] = []
    if train is None and config.batch_norms == "insert" and not config.freeze_batch_norm:
        student, inserted = insert_batch_norms(student, data, batch=config.batch, device=device, freeze=config.freeze)
    if config.distill > 0 or config.features > 0:
        if teacher is None:
            raise UsageError("distill or features is above 0, but there is no teacher: give the network before it was pruned")
        taught = fold_batch_norms(free_batch(without_softmax(teacher), data, config.batch, device))
        if config.features > 0:
            mark_features(student, taught)
        answers = NetworkModule(taught).to(device).eval().requires_grad_(False)
    module = NetworkModule(student, freeze=config.freeze, train=config.train).to(device)
    gradual = GradualPruning(net, student, inserted, data, config, device) if config.prune_to else None
    done = train_module(
        net, module, data, config, teacher=answers, test=test, progress=progress, train=train, inserted=inserted, gradual=gradual
    )  # fmt: skip
    if gradual is not None:
        note(done.network, "prune", target=config.prune_to, steps=config.prune_steps, schedule=config.prune_schedule)
    note(done.network, "finetune", steps=done.steps)
    return done


def train_module(
    net: Network,
    module: NetworkModule,
    data: TrainingData | Batches,
    config: FinetuneConfig,
    *,
    teacher: NetworkModule | None = None,
    test: TrainingData | Batches | None = None,
    progress: Progress | None = None,
    train: str | Callable[..., Any] | None = None,
    title: str = "fine-tuned",
    inserted: Sequence[InsertedBatchNorm] = (),
    gradual: GradualPruning | None = None,
) -> Finetuned:
    """Trains `module` on its device and copies its weights into `net`, with the `inserted` batch norms folded and the cuts of `gradual`."""
    masks = make_masks(module.network, config.masks) if config.masks else {}
    hold(module, masks)
    started = time.perf_counter()
    fitted = Fitted([], 0, 0, None)
    if train is not None:
        module.train()
        (import_user_function(train, "--train") if isinstance(train, str) else train)(module, data, config)
    else:
        if isinstance(data, TrainingData) and config.distill < 1 and config.loss in ("auto", "cross_entropy"):
            data.must_be_classes_of(module.network.outputs[0].type)
        fitted = fit(
            module, data, config, teacher=teacher, test=test, progress=progress, digest=digest(net), outputs=len(net.outputs), gradual=gradual
        )  # fmt: skip
    reapply(module, masks)
    seconds = time.perf_counter() - started
    about = {"what": title, "steps": fitted.steps, "settings": {k: v for k, v in config.settings().items() if v != getattr(FinetuneConfig(), k)}}
    unchanged = fitted.kept_epoch == 0 and not masks and gradual is None  # without the rounding of inserted batch norms
    present = net if gradual is None else gradual.cut_network()
    made = with_weights(present, {} if unchanged else fold_weights(module.weights(), inserted), about=json.dumps(about))
    judged = None if test is None else _judge(made, module, test, config.batch, bool(inserted))
    return Finetuned(made, fitted.history, fitted.steps, seconds, fitted.resumed_at, judged, masks, fitted.kept_epoch, len(inserted),
                     None if gradual is None else make_pruning_recipe(net, gradual.kept, channel_groups=gradual.groups))  # fmt: skip


def _judge(made: Network, module: NetworkModule, test: TrainingData | Batches, batch: int, folded: bool) -> float:
    """The accuracy of the trained network, which is that of `module` unless batch norms were `folded`."""
    device = next(module.parameters()).device
    judge = NetworkModule(free_batch(without_softmax(made), test, batch, device)).to(device) if folded else module
    return accuracy(judge, test, batch=batch)


def fold_batch_norms(net: Network) -> Network:
    """A copy with batch norms folded into weights, as for teachers, calibration and Q/DQ insertion."""
    made = net.clone()
    run_passes(made, [p for p in select(3, ()) if p.phase <= Phase.FOLD])
    return made


def without_softmax(net: Network) -> Network:
    """A copy without a final Softmax: losses take logits."""
    made = net.clone()
    for i, t in enumerate(made.outputs):
        if t.maker is not None and t.maker.op == "Softmax" and t.maker.attrs["axis"] in (-1, t.type.rank - 1) and t.type.rank == 2:
            made.outputs[i] = t.maker.needs(0)
    made.prune_dead()
    return made


def select_device(name: str) -> torch.device:
    """The torch device of a name; auto prefers CUDA. Raises TrainingError for an unavailable device."""
    if name == "auto":
        found = read_workers()
        one = f"cuda:{found.local}" if found.count > 1 else "cuda"
        return torch.device(one if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise UsageError(f"device is auto, cpu, cuda or cuda:N, not {name!r}") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError("there is no CUDA device that this PyTorch can use; leave out device, or install a CUDA build of PyTorch")
    return device


def digest(net: Network) -> str:
    """SHA-256 of the network's structure and weights, which identifies it in checkpoints."""
    h = hashlib.sha256()
    for layer in net.layers:
        h.update(f"{layer.op}|{layer.name}|{sorted(layer.attrs.items(), key=str)}|{[None if t is None else t.name for t in layer.inputs]}".encode())
    for name, t in net.constants.items():
        h.update(f"{name}|{t.weight.digest if t.weight is not None else ''}".encode())
    return h.hexdigest()



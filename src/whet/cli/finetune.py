"""`whet finetune`: trains a model on labels, on a teacher's outputs, or both, with fixed sparsity masks; writes FP32 or, with --qat, Q/DQ."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whet.cli._console import Bar, print_json
from whet.cli._output_files import check_writable
from whet.training.config import BATCH_NORMS, LOSSES, MASKS, OPTIMIZERS, PRECISIONS, SCHEDULES, FinetuneConfig

if TYPE_CHECKING:
    from whet.pruning import Recipe

_FIELDS = {f.name: f.default for f in FinetuneConfig.__dataclass_fields__.values()}


def _make_option(flag: str, field: str, text: str, **how: Any) -> Any:
    """An option with the default of the FinetuneConfig field."""
    return click.option(f"--{flag}", field, default=_FIELDS[field], show_default=True, help=text, **how)


@click.command()
@click.argument("model", type=click.Path())
@click.option(
    "--data", "data_source", required=True, help="FILE.npz, python:MODULE:FUNCTION, or a folder of images (one subfolder per class, or no labels)."
)
@click.option("--test", "test_source", help="Labelled test data, from the same kinds of sources: accuracy per epoch and of the result.")
@click.option("--preprocess", help="Preprocessing of images, as --calibPreprocess of whet exec: scale:1/255,mean:..,std:..")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="ONNX file to write (default: MODEL.tuned.onnx).")
@click.option("--teacher", type=click.Path(dir_okay=False), help="The original model, for --distill.")
@click.option("--train", "user_loop", help="Your own training function, python:MODULE:FUNCTION(module, data, config), instead of whet's loop.")
@click.option("--recipe", type=click.Path(dir_okay=False), help="Pruning recipe to write masks or the cuts of --pruneTo to.")
@click.option("--insist", is_flag=True, help="Train even if this breaks the order of steps (prune, fine-tune, calibrate).")
@click.option("--qat", is_flag=True, help="Quantization-aware training: round as INT8 engines do, write Q/DQ. The last step, after fine-tuning.")
@_make_option("epochs", "epochs", "Passes over the data.", type=float)
@_make_option("seconds", "seconds", "Time limit in seconds; 0: none.", type=float)
@_make_option("batch", "batch", "Samples per step.", type=int)
@_make_option("lr", "lr", "Peak learning rate.", type=float)
@_make_option("warmup", "warmup", "Share of the steps with a rising learning rate.", type=float)
@_make_option("lastLr", "last_lr", "Final learning rate as a share of --lr.", type=float)
@_make_option("optimizer", "optimizer", "Optimizer.", type=click.Choice(OPTIMIZERS))
@_make_option("momentum", "momentum", "Momentum of SGD; first moment decay of AdamW.", type=float)
@_make_option("weightDecay", "weight_decay", "Weight decay of matrices; vectors have none.", type=float)
@_make_option("clip", "clip", "Maximum gradient norm; 0: no clipping.", type=float)
@_make_option("accumulate", "accumulate", "Batches whose gradients are added before a step.", type=int)
@_make_option("ema", "ema", "Decay of a moving average of the weights, which becomes the result; 0: none.", type=float)
@_make_option("holdout", "holdout", "Share of the samples that the best epoch is selected on; 0: keep the last.", type=float)
@_make_option("batchNorms", "batch_norms", "Insert batch norms for the training where an export has none, or not.", type=click.Choice(BATCH_NORMS))
@_make_option("precision", "precision", "Compute precision; weights stay FP32.", type=click.Choice(PRECISIONS))
@_make_option("loss", "loss", f"{', '.join(LOSSES)}, or python:MODULE:FUNCTION(outputs, labels).")
@_make_option("labelSmoothing", "label_smoothing", "Label smoothing of the cross entropy.", type=float)
@_make_option("distill", "distill", "Weight of the distance to the teacher in the loss; 1 needs no labels.", type=float)
@_make_option("distillLoss", "distill_loss", "auto, or python:MODULE:FUNCTION(outputs, teacher outputs), as for detectors.")
@_make_option("temperature", "temperature", "Distillation temperature of classifiers.", type=float)
@_make_option("features", "features", "Weight of the distance to the teacher's features in the loss.", type=float)
@_make_option("views", "views", "Augmented views per sample, used in rotation, with one teacher output each. 0: always new views.", type=int)
@_make_option("masks", "masks", "Zeros to keep: 2:4, or the present ones.", type=click.Choice(MASKS))
@_make_option("pruneTo", "prune_to", "Cut channels in steps during the training: flops=0.6x, params=0.5x or channels=0.7x remain.")
@_make_option("pruneSteps", "prune_steps", "Cuts until --pruneTo is reached.", type=int)
@_make_option("pruneSchedule", "prune_schedule", "Cost removed after each cut: cubic (large cuts first) or linear.", type=click.Choice(SCHEDULES))
@_make_option("pruneBegin", "prune_begin", "Share of the training before the first cut.", type=float)
@_make_option("pruneEnd", "prune_end", "Share of the training before the last cut.", type=float)
@_make_option("pruneImportance", "prune_importance", "Importance as for whet prune; auto: taylor2, else reconstruction.")
@_make_option("augment", "augment", "crop:N, flip, cutmix:PERCENT (with --distill=1), separated by commas.")
@_make_option("device", "device", "auto (a GPU if there is one), cpu, cuda, cuda:N.")
@_make_option("seed", "seed", "Seed of sample order and augmentation.", type=int)
@_make_option("checkpoint", "checkpoint", "Checkpoint file; an interrupted training continues from it.")
@_make_option("checkpointSeconds", "checkpoint_seconds", "Seconds between two checkpoints.", type=float)
@_make_option("log", "log", "FILE.csv, or a folder for TensorBoard: loss, rate, errors per epoch.")
@click.option("--compile", "compile", is_flag=True, help="Fuse steps with torch.compile: pays off in long trainings on a GPU.")
@click.option("--freezeBatchNorm", "freeze_batch_norm", is_flag=True, help="Keep the batch-norm statistics fixed.")
@click.option("--channelsLast/--noChannelsLast", "channels_last", default=None, help="Memory layout of images (default: channels last on CUDA).")
@click.option("--graph/--noGraph", "graph", default=None, help="One CUDA graph per step (default: where possible).")
@click.option("--trainAlso", "train_also", multiple=True, help="Pattern of further constants to train (repeatable).")
@click.option("--freeze", multiple=True, help="Pattern of weights to keep fixed (repeatable).")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
def command(
    model: str,
    data_source: str,
    test_source: str | None,
    preprocess: str | None,
    output: str | None,
    teacher: str | None,
    user_loop: str | None,
    qat: bool,
    recipe: str | None,
    insist: bool,
    freeze: tuple[str, ...],
    train_also: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Train a model after pruning, on whet's own graph; needs the extra whet[train].

    Prune, fine-tune, calibrate (or --qat), build: in this order. A training that was killed continues from --checkpoint with the same results.
    """
    from whet.errors import UsageError
    from whet.frontends import network_from_file, save_onnx
    from whet.precision import Preprocessing
    from whet.pruning import count_params
    from whet.training import finetune, read_training_data, train_quantization_aware
    from whet.training.distributed import read_workers

    if qat and user_loop:
        raise UsageError("--train is for floating point; with --qat whet's own loop trains")
    if recipe and not settings["masks"] and not settings["prune_to"]:
        raise UsageError("--recipe stores the masks of --masks or the cuts of --pruneTo: give --masks=2:4, --masks=zeros or --pruneTo")
    say = partial(click.echo, err=as_json)
    target = output or str(Path(model).with_suffix(".tuned.onnx"))
    check_writable(model, teacher, data_source, test_source, output=target, recipe=recipe, checkpoint=settings["checkpoint"] or None)
    net = network_from_file(model)
    original = network_from_file(teacher) if teacher else None
    preprocessing = Preprocessing.parse(preprocess) if preprocess else None
    data = read_training_data(data_source, net, preprocessing)
    test = read_training_data(test_source, net, preprocessing) if test_source else None
    config = FinetuneConfig(**settings, freeze=freeze, train=train_also)
    with Bar("training") as bar:
        if qat:
            aware = train_quantization_aware(net, data, config, teacher=original, test=test, progress=bar.update, insist=insist)
            trained, done = aware.network, aware.training
        else:
            done = finetune(net, data, config, teacher=original, test=test, progress=bar.update, train=user_loop, insist=insist)
            trained = done.network
    if not read_workers().first:
        return  # process 0 of torchrun writes
    for h in done.history:
        words = [f"{what} {h[key]:.4f}" for key, what in (("loss", "loss"), ("held_out", "held-out error")) if key in h]
        words += [f"accuracy {h['accuracy']:.2%}"] if "accuracy" in h else []
        say(f"epoch {h['epoch']:.0f}: {', '.join(words)}, {h['seconds']:.1f} s")
    if done.resumed_at:
        say(f"continued from step {done.resumed_at} of {config.checkpoint}")
    if done.inserted:
        say(f"{done.inserted} batch norms were inserted for the training and folded again (--batchNorms=keep: not)")
    if done.kept_epoch == 0:
        say("no epoch has a smaller held-out error than the network before the training, which is written. Try a lower --lr or more --epochs.")
    elif done.kept_epoch is not None and done.kept_epoch < len(done.history):
        say(f"epoch {done.kept_epoch} has the smallest held-out error and is written")
    if done.masked_weights:
        say(f"zeros of {done.masked_weights} weights were kept ({config.masks})")
    if done.cuts is not None:
        say(f"cut in {config.prune_steps} steps to {config.prune_to}: {count_params(trained) / count_params(net):.1%} of the parameters remain")
    if recipe:
        say(f"recipe: {_write_recipe(recipe, done.masks, done.cuts)}")
    save_onnx(trained, target)
    if as_json:
        facts = {"steps": done.steps, "seconds": done.seconds, "resumed_at": done.resumed_at, "masks": done.masked_weights, "accuracy": done.accuracy,
                 "kept_epoch": done.kept_epoch, "inserted_batch_norms": done.inserted,
                 "params": [count_params(net), count_params(trained)]}  # fmt: skip
        print_json({"model": target, "history": done.history, **facts, "trained_by": user_loop, "recipe": recipe})
        return
    accuracy = f"; accuracy {done.accuracy:.2%} on {len(test)} samples" if done.accuracy is not None and test is not None else ""
    by = f"trained by {user_loop}" if user_loop else f"{done.steps} steps"
    say(f"{target}: {by} in {done.seconds:.1f} s{accuracy}")


def _write_recipe(path: str, masks: Mapping[str, Any], cuts: Recipe | None) -> Path:
    """Writes the recipe of the cuts, or adds the masks to the recipe in `path` (created if missing)."""
    from dataclasses import replace

    from whet.pruning import Recipe, load_recipe, save_recipe

    if cuts is not None:
        return save_recipe(cuts, path)
    known = load_recipe(path) if Path(path).exists() else Recipe({})
    return save_recipe(replace(known, masks=masks), path)

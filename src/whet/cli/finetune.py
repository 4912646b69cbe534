"""`whet finetune`: trains a model on labels, on the original's outputs, or both; holds masks; ends in FP32 or in Q/DQ for INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar
from whet.cli._written import must_be_writable
from whet.training.config import LOSSES, MASKS, OPTIMIZERS, PRECISIONS, FinetuneConfig

_FIELDS = {f.name: f.default for f in FinetuneConfig.__dataclass_fields__.values()}


def _setting(flag: str, field: str, text: str, **how: Any) -> Any:
    """A flag whose default is the field's."""
    return click.option(f"--{flag}", field, default=_FIELDS[field], show_default=True, help=text, **how)


@click.command()
@click.argument("model", type=click.Path())
@click.option("--data", "data_source", required=True, help="FILE.npz, a folder with one subfolder of images a class, or python:MODULE:FUNCTION.")
@click.option("--test", "test_source", help="Labelled data of the same kinds, to judge each epoch and the result by.")
@click.option("--preprocess", help="How images become numbers, as --calibPreprocess of whet exec: scale:1/255,mean:..,std:..")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="ONNX file to write (default: MODEL.tuned.onnx).")
@click.option("--teacher", type=click.Path(dir_okay=False), help="The original model, for --distill.")
@click.option("--train", "own", help="Your own training function, python:MODULE:FUNCTION(module, data, config), instead of whet's loop.")
@click.option("--recipe", type=click.Path(dir_okay=False), help="Pruning recipe that the held masks are written into (new if not there).")
@click.option("--insist", is_flag=True, help="Train although the order of steps (prune, fine-tune, calibrate) forbids it.")
@click.option("--qat", is_flag=True, help="Quantization-aware: round as INT8 engines do, and write Q/DQ. Do it last, on a fine-tuned model.")
@_setting("epochs", "epochs", "Passes over the data.", type=float)
@_setting("seconds", "seconds", "Stop here at the latest; 0: no limit.", type=float)
@_setting("batch", "batch", "Samples a step.", type=int)
@_setting("lr", "lr", "The highest learning rate.", type=float)
@_setting("warmup", "warmup", "Share of the steps in which the rate rises.", type=float)
@_setting("optimizer", "optimizer", "What makes the steps.", type=click.Choice(OPTIMIZERS))
@_setting("weightDecay", "weight_decay", "Of matrices, not of vectors.", type=float)
@_setting("clip", "clip", "Largest norm of the gradient; 0: not clipped.", type=float)
@_setting("precision", "precision", "What is computed in; weights stay FP32.", type=click.Choice(PRECISIONS))
@_setting("loss", "loss", f"{', '.join(LOSSES)}, or python:MODULE:FUNCTION(outputs, labels).")
@_setting("labelSmoothing", "label_smoothing", "Of cross entropy.", type=float)
@_setting("distill", "distill", "Share of the loss that is the distance to the teacher; 1 needs no labels.", type=float)
@_setting("temperature", "temperature", "Of the distillation of classifiers.", type=float)
@_setting("views", "views", "Augmented forms of each sample, used in turns; the teacher answers each once. 0: new ones.", type=int)
@_setting("masks", "masks", "Zeros to hold: 2:4, or those that are there.", type=click.Choice(MASKS))
@_setting("augment", "augment", "crop:N, flip, cutmix:PERCENT (with --distill=1); comma between.")
@_setting("device", "device", "auto, cpu, cuda, cuda:N.")
@_setting("seed", "seed", "Order and augmentation.", type=int)
@_setting("checkpoint", "checkpoint", "File that a killed training goes on from.")
@_setting("checkpointSeconds", "checkpoint_seconds", "Between two checkpoints.", type=float)
@click.option("--compile", "compile", is_flag=True, help="Fuse steps with torch.compile: worth its minute in long trainings on a GPU.")
@click.option("--freezeBatchNorm", "freeze_batch_norm", is_flag=True, help="Keep the statistics as they are.")
@click.option("--freeze", multiple=True, help="Pattern of weights that stay (repeatable).")
def command(
    model: str,
    data_source: str,
    test_source: str | None,
    preprocess: str | None,
    output: str | None,
    teacher: str | None,
    own: str | None,
    qat: bool,
    recipe: str | None,
    insist: bool,
    freeze: tuple[str, ...],
    **settings: Any,
) -> None:
    """Train a model after pruning, on the same graph that is pruned before and built after; needs the extra whet[train].

    Prune, fine-tune, calibrate (or --qat), build: in this order. A training that was killed goes on from --checkpoint with the same numbers.
    """
    from whet.errors import UsageError
    from whet.frontends import network_from_onnx, save_onnx
    from whet.precision import Preprocessing
    from whet.training import finetune, quantization_aware, training_data

    if qat and own:
        raise UsageError("--train is for floating point; with --qat whet's own loop trains")
    if recipe and not settings["masks"]:
        raise UsageError("--recipe keeps the zeros that --masks holds: give --masks=2:4 or --masks=zeros")
    target = output or str(Path(model).with_suffix(".tuned.onnx"))
    must_be_writable(model, teacher, data_source, test_source, output=target, recipe=recipe, checkpoint=settings["checkpoint"] or None)
    net = network_from_onnx(model)
    original = network_from_onnx(teacher) if teacher else None
    how = Preprocessing.parse(preprocess) if preprocess else None
    data = training_data(data_source, net, how)
    test = training_data(test_source, net, how) if test_source else None
    config = FinetuneConfig(**settings, freeze=freeze)
    with Bar("training") as bar:
        if qat:
            aware = quantization_aware(net, data, config, teacher=original, test=test, progress=bar.tell, insist=insist)
            made, done = aware.network, aware.training
        else:
            done = finetune(net, data, config, teacher=original, test=test, progress=bar.tell, train=own, insist=insist)
            made = done.network
    for h in done.history:
        judged = f", accuracy {h['accuracy']:.2%}" if "accuracy" in h else ""
        click.echo(f"epoch {h['epoch']:.0f}: loss {h['loss']:.4f}{judged}, {h['seconds']:.1f} s")
    if done.resumed_at:
        click.echo(f"went on from step {done.resumed_at} of {config.checkpoint}")
    if done.held:
        click.echo(f"zeros of {done.held} weights were held ({config.masks})")
    if recipe:
        click.echo(f"recipe: {_with_masks(recipe, done.masks)}, {len(done.masks)} masks")
    save_onnx(made, target)
    judged = f"; accuracy {done.accuracy:.2%} on {len(test)} samples" if done.accuracy is not None and test is not None else ""
    by = f"trained by {own}" if own else f"{done.steps} steps"
    click.echo(f"{target}: {by} in {done.seconds:.1f} s{judged}")


def _with_masks(path: str, masks: Any) -> Path:
    """The recipe in `path` (an empty one, if there is none) with these masks, written back."""
    from dataclasses import replace

    from whet.pruning import Recipe, load_recipe, save_recipe

    known = load_recipe(path) if Path(path).exists() else Recipe({})
    return save_recipe(replace(known, masks=masks), path)

"""`whet prune`: cut channels out of a model, recover it without labels, write the smaller model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="ONNX file to write (default: MODEL.pruned.onnx).")
@click.option("--ratio", type=click.FloatRange(0, 1, max_open=True), default=0.4, show_default=True, help="Share of all channels to cut.")
@click.option("--importance", type=click.Choice(["l1", "l2", "random"]), default="l1", show_default=True)
@click.option("--scope", type=click.Choice(["global", "group"]), default="global", show_default=True, help="Least important of all, or of each.")
@click.option("--multiple", type=click.IntRange(1), default=8, show_default=True, help="Kept channels of a group are a multiple of this.")
@click.option("--skip", multiple=True, help="Group that stays whole (repeatable; the recipe names the groups).")
@click.option("--calibData", "data", help="Data to recover on, no labels: DIR, FILE.npz, FILE.npy or python:MODULE:FUNCTION.")
@click.option("--calibPreprocess", "preprocess", help="How images become numbers, as for whet exec.")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, help="How many samples to recover on.")
@click.option("--recipe", "recipe_out", type=click.Path(dir_okay=False), help="Write what was cut (JSON).")
@click.option("--applyRecipe", "recipe_in", type=click.Path(dir_okay=False), help="Cut what this recipe says; nothing is recovered.")
def command(
    model: str,
    output: str | None,
    ratio: float,
    importance: str,
    scope: str,
    multiple: int,
    skip: tuple[str, ...],
    data: str | None,
    preprocess: str | None,
    samples: int,
    recipe_out: str | None,
    recipe_in: str | None,
) -> None:
    """Cut whole channels (coupled through convolutions, norms, sums and products), so that every kernel has less to do.

    Without --calibData nothing is recovered: fine-tune the result, or expect to lose much. Whether it became faster is for
    `whet exec` to say: build both models and compare.
    """
    from whet.frontends import network_from_onnx, save_onnx
    from whet.pruning import PruneConfig, apply_recipe, count_flops, count_params, load_recipe, prune, save_recipe

    net = network_from_onnx(model)
    if recipe_in:
        made = apply_recipe(net, load_recipe(recipe_in))
    else:
        config = PruneConfig(ratio=ratio, importance=importance, scope=scope, multiple=multiple, skip=skip)
        feeds = _stacked(net, data, preprocess, samples) if data else None
        with _Bar(enabled=data is not None and sys.stderr.isatty()) as bar:
            done = prune(net, config, feeds, bar.tell)
        made = done.network
        click.echo(f"cut {done.channels[0] - done.channels[1]} of {done.channels[0]} channels ({done.share:.0%}) by {importance}, {scope}")
        if recipe_out:
            click.echo(f"recipe: {save_recipe(done.recipe, recipe_out)}")
        if feeds is None:
            click.echo("nothing was recovered: give --calibData (no labels needed), or fine-tune")
    target = save_onnx(made, output or str(Path(model).with_suffix(".pruned.onnx")))
    before, after = (count_params(n) for n in (net, made))
    flops = [_flops(count_flops, n) for n in (net, made)]
    click.echo(f"{target}: parameters {before:,} -> {after:,}" + (f", FLOPs {flops[0]:,} -> {flops[1]:,}" if all(flops) else ""))


def _flops(count: Any, net: Any) -> int:
    """FLOPs with every symbol 1; 0 where a symbol stands where that makes no sense."""
    from whet.errors import WhetError

    try:
        return int(count(net))
    except WhetError:
        return 0


def _stacked(net: Any, source: str, preprocess: str | None, samples: int) -> dict[str, Any]:
    """The first `samples` samples, stacked along the batch by input name."""
    import numpy as np

    from whet.precision import Preprocessing, calibration_data

    found: Iterator[dict[str, Any]] = calibration_data(source, net, Preprocessing.parse(preprocess) if preprocess else None)
    some = list(islice(found, samples))
    return {name: np.concatenate([s[name] for s in some]) for name in some[0]}


class _Bar:
    """A progress bar on standard error; `tell(done, total, what)` moves it."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Bar:
        if self.enabled:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("recovering", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"recovering {what[:40]}")

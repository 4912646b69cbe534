"""`whet compare`: a model and what became of it, side by side: counts, zeros, and both engines timed in turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar
from whet.cli._prune_flags import build_config, build_flags


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path())
@click.option("--noEngines", "no_engines", is_flag=True, help="Count only; build and time nothing.")
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0, show_default=True, help="How long each engine runs.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@build_flags
def command(models: tuple[str, ...], no_engines: bool, seconds: float, as_json: bool, **build: Any) -> None:
    """Compare ORIGINAL.onnx with pruned ones, whoever pruned them: whet, Torch-Pruning, ASP, ModelOpt, masks of your own.

    Parameters, FLOPs, bytes, zeros that no kernel sees, 2:4 layers; then engines of all, built alike and run in turns on this machine. That
    is the report of `whet prune` for models that come from elsewhere. Nothing is verified here: `whet exec` does that.
    """
    from whet.cli._console import console, print_table
    from whet.errors import UsageError
    from whet.frontends import network_from_onnx
    from whet.pruning import compare

    if len(models) < 2:
        raise UsageError("whet compare takes at least two models: the original and what became of it")
    if len(set(models)) < len(models):
        raise UsageError("whet compare was given one model twice: name the original first, then others")
    stems = [Path(m).stem for m in models]
    names = stems if len(set(stems)) == len(stems) else list(models)
    nets = {name: network_from_onnx(m) for name, m in zip(names, models, strict=True)}
    with Bar("building") as bar:
        made = compare(nets, None if no_engines else build_config(**build), seconds=seconds, progress=bar.tell)
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=1))
        return
    print_table(console(), ["", *(f">{n}" for n in made.names)], made.rows())
    for text in made.said:
        click.echo(text)

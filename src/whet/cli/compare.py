"""`whet compare`: compares models with the original: counts, zeros, and engines with interleaved timing."""

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
@click.option("--seconds", type=click.FloatRange(0.01), default=1.0, show_default=True, help="Time per engine.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
@build_flags
def command(models: tuple[str, ...], no_engines: bool, seconds: float, as_json: bool, **build: Any) -> None:
    """Compare ORIGINAL.onnx with pruned models, from any tool: whet, Torch-Pruning, ASP, ModelOpt, your own masks.

    Prints parameters, FLOPs, bytes, zeros that no kernel skips and 2:4 layers; then builds engines of all models with the same options and
    times them interleaved on this machine: the report of `whet prune` for models from elsewhere. `whet exec` verifies engines; this does not.
    """
    from whet.cli._console import console, print_table
    from whet.errors import UsageError
    from whet.frontends import network_from_onnx
    from whet.pruning import compare

    if len(models) < 2:
        raise UsageError("whet compare takes at least two models: the original and a changed one")
    if len(set(models)) < len(models):
        raise UsageError("whet compare was given a model twice: name the original first, then others")
    stems = [Path(m).stem for m in models]
    names = stems if len(set(stems)) == len(stems) else list(models)
    nets = {name: network_from_onnx(m) for name, m in zip(names, models, strict=True)}
    with Bar("building") as bar:
        comparison = compare(nets, None if no_engines else build_config(**build), seconds=seconds, progress=bar.update)
    if as_json:
        click.echo(json.dumps(comparison.to_json(), indent=1))
        return
    print_table(console(), ["", *(f">{n}" for n in comparison.names)], comparison.rows())
    for text in comparison.said:
        click.echo(text)

"""`whet compare`: models with the original (counts, zeros, engines), saved engines, optimization levels, and passes; timed interleaved."""

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
@click.option("--levels", is_flag=True, help="One model: build all optimization levels and one engine without passes, and compare these.")
@click.option("--ablate", is_flag=True, help="One model: switch off each pass that fired, one at a time, and show what it is worth.")
@click.option("--tensorrt", is_flag=True, help="TensorRT's own engine of each ONNX file too (NVIDIA's Python package tensorrt).")
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="Number of differing layers to show.")
@click.option("--html", type=click.Path(), help="Write an HTML page of the comparison.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
@build_flags
def command(
    models: tuple[str, ...], no_engines: bool, seconds: float, levels: bool, ablate: bool, tensorrt: bool, top: int, html: str | None, as_json: bool,
    **build: Any,
) -> None:  # fmt: skip
    """Compare engines, or ORIGINAL.onnx with pruned models from any tool: whet, Torch-Pruning, ASP, ModelOpt, your own masks.

    Models are built, with the same options. Engines are timed interleaved on this machine: latencies with a verdict, output differences, and the
    layers that differ, with times, aligned by the nodes that they compute. --tensorrt adds TensorRT's own
    engines of the models. --levels and --ablate compare builds of one model.

    Models alone have their parameters, FLOPs, bytes, zeros that no kernel skips and 2:4 layers above that: the report of `whet prune` for models
    from elsewhere. `whet exec` verifies engines; this does not.
    """
    from whet.cli._compare_engines import compare_builds, compare_files, compare_models
    from whet.cli._console import make_console, print_table
    from whet.cli._exec_values import parse_shapes as parse_shapes
    from whet.cli._output_files import check_page
    from whet.cli._runners import is_engine
    from whet.errors import UsageError
    from whet.frontends import network_from_file
    from whet.pruning import compare

    check_page(*models, html=html)
    at = parse_shapes(build["shapes"], "shapes") if build["shapes"] else None
    if levels or ablate:
        if (levels and ablate) or len(models) != 1 or is_engine(models[0]):
            raise UsageError("--levels or --ablate takes one model")
        compare_builds(models[0], build_config(**build), at, seconds, top, as_json, html, ablate=ablate)
        return
    if len(models) < 2 and not tensorrt:
        least = "whet compare takes at least two engines or models: the original and a changed one"
        raise UsageError(f"{least}. For one model: --levels, --ablate or --tensorrt")
    if len(set(models)) < len(models):
        raise UsageError("whet compare was given a model twice: name the original first, then others")
    if tensorrt or any(map(is_engine, models)):
        if no_engines:
            raise UsageError("--noEngines counts models only; leave it out to compare engines")
        compare_files(models, build_config(**build), at, seconds, top, as_json, html, tensorrt=tensorrt)
        return
    if html is not None and no_engines:
        raise UsageError("--html shows engines: leave --noEngines out")
    stems = [Path(m).stem for m in models]
    names = stems if len(set(stems)) == len(stems) else list(models)
    nets = {name: network_from_file(m) for name, m in zip(names, models, strict=True)}
    with Bar("building") as bar:
        comparison = compare(nets, None if no_engines else build_config(**build), seconds=seconds, progress=bar.update)
    if as_json and no_engines:
        click.echo(json.dumps(comparison.to_json(), indent=1))
    if not as_json:
        print_table(make_console(), ["", *(f">{n}" for n in comparison.names)], comparison.rows())
        for text in comparison.said:
            click.echo(text)
    if not no_engines:
        compare_models(comparison, at, top, as_json, html)

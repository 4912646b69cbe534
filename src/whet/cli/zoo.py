"""`whet zoo`: writes the standard networks as ONNX files with random weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click


@click.command()
@click.argument("name", default="list")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (default: NAME.onnx).")
@click.option("--batch", default="N", show_default=True, help="Batch size, or the name of a dynamic one.")
@click.option("--opset", type=int, default=17, show_default=True, help="ONNX opset of the file.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random weights.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
def command(name: str, output: str | None, batch: str, opset: int, seed: int, as_json: bool) -> None:
    """Write a standard network (`whet zoo resnet18 -o resnet18.onnx`), or list them (`whet zoo list`).

    The weights are random: good for timing, not for accuracy.
    """
    from whet import zoo

    if name == "list":
        _list(as_json)
        return
    target = Path(output or f"{name}.onnx")
    zoo.save(name, target, batch=int(batch) if batch.isdigit() else batch, opset=opset, seed=seed)
    size = target.stat().st_size
    click.echo(json.dumps({"model": str(target), "bytes": size}, indent=1) if as_json else f"{target}  {size / 2**20:.1f} MiB")


def _list(as_json: bool) -> None:
    from whet import zoo

    rows = [zoo.info(n) for n in zoo.names()]
    if as_json:
        click.echo(json.dumps([{**dataclasses.asdict(r), "gflops": r.gflops} for r in rows], indent=1))
        return
    from whet.cli._console import make_console, print_table

    cells = []
    for r in rows:
        inputs = ", ".join(f"{n}:{'x'.join(map(str, shape))}" for n, (_, shape) in r.inputs.items())
        cells.append([r.name, f"{r.parameters:,}", f"{r.gflops:.2f}", inputs, r.about])
    print_table(make_console(), ["name", ">parameters", ">GFLOPs", "inputs", "what"], cells, below=("what", "inputs"))

"""`whet latency-table`: measure how long a model's layers take at every width that pruning may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar
from whet.cli._prune_flags import build_config, build_flags
from whet.cli._written import must_be_writable


@click.command()
@click.argument("model", type=click.Path())
@click.option("--export", "table", type=click.Path(dir_okay=False), help="File to write or to extend (default: MODEL.latency.json).")
@click.option("--add", multiple=True, type=click.Path(dir_okay=False), help="Table whose rows are taken over, repeatable.")
@click.option("--retime", is_flag=True, help="Time all of the model's rows again, whatever table and timing cache know.")
@click.option("--multiple", type=click.IntRange(1), default=8, show_default=True, help="Widths are multiples of this.")
@click.option("--most", type=click.IntRange(2), default=12, show_default=True, help="Widths a group, at most.")
@build_flags
def command(model: str, table: str | None, add: tuple[str, ...], multiple: int, most: int, retime: bool, **build: Any) -> None:
    """Time every layer of MODEL over its widths with the engine's own tactics, and show where the steps are.

    The file holds one row a layer and shape, keyed by device, library versions, precision and tactics: `whet prune --latencyTable` reads
    it, other models add to it, other machines' rows can stand in it too. Stop it with Ctrl-C; the next run goes on. Rows that were timed while other
    processes used the CPUs are marked, and timed again by the next run that finds the machine quiet.
    """
    from whet.frontends import network_from_onnx
    from whet.pruning.latency_table import LatencyTable
    from whet.pruning.staircase import staircases

    net = network_from_onnx(model)
    target = table or str(Path(model).with_suffix(".latency.json"))
    must_be_writable(export=target)
    rows = LatencyTable(target)
    for path in add:
        click.echo(f"{path}: {rows.take(path)} rows that {target} did not have")
    known = len(rows.rows)
    try:
        with Bar("timing") as bar:
            found, total = staircases(net, build_config(**build), rows, multiple=multiple, most=most, retime=retime, progress=bar.tell)
    finally:
        rows.save()
        click.echo(f"{target}: {len(rows.rows)} rows, {rows.added} of them new" + (f", {known} known before" if known else ""))
    if rows.busy:
        who = "other processes or virtual machines"
        click.echo(f"{rows.busy} rows were timed while {who} used the CPUs: the next run that finds the machine quiet takes its own again")
    click.echo(f"sum of the layers' times: {total:.3f} ms")
    for s in found:
        steps = "  ".join(f"{w}:{t:.4g}" + ("" if w in s.edges else "-") for w, t in zip(s.widths, s.ms, strict=True))
        click.echo(f"{s.group} ({s.widths[-1]}): {steps}")
    click.echo("units kept : ms of the layers that they touch; a minus marks a width that a wider one equals")

"""`whet latency-table`: measures the latency of a model's layers at every width that pruning may choose."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar, print_json
from whet.cli._output_files import check_writable
from whet.cli._prune_flags import build_config, build_flags


@click.command()
@click.argument("model", type=click.Path())
@click.option("--export", "table", type=click.Path(dir_okay=False), help="File to create or extend (default: MODEL.latency.json).")
@click.option("--add", multiple=True, type=click.Path(dir_okay=False), help="Table to import rows from (repeatable).")
@click.option("--retime", is_flag=True, help="Time all of the model's rows again; ignore the table and the timing cache.")
@click.option("--multiple", type=click.IntRange(1), default=8, show_default=True, help="Widths are multiples of this.")
@click.option("--most", type=click.IntRange(2), default=12, show_default=True, help="Maximum number of widths per group.")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
@build_flags
def command(model: str, table: str | None, add: tuple[str, ...], multiple: int, most: int, retime: bool, as_json: bool, **build: Any) -> None:
    """Time every layer of MODEL over its widths with the engine's tactics, and show the steps of the latency.

    The file holds one row per layer and shape, keyed by device, library versions, precision and tactics. `whet prune --latencyTable` reads
    it; rows of several models and machines can share it. After Ctrl-C the next run continues. Rows timed under external load are marked,
    and re-timed by the next run on an idle machine.
    """
    from whet.frontends import network_from_file
    from whet.pruning.latency_table import LatencyTable
    from whet.pruning.staircase import compute_staircases

    say = partial(click.echo, err=as_json)
    net = network_from_file(model)
    target = table or str(Path(model).with_suffix(".latency.json"))
    check_writable(export=target)
    rows = LatencyTable(target)
    for path in add:
        say(f"{path}: {rows.take(path)} rows that {target} did not have")
    known = len(rows.rows)
    try:
        with Bar("timing") as bar:
            curves, total = compute_staircases(net, build_config(**build), rows, multiple=multiple, most=most, retime=retime, progress=bar.update)
    finally:
        rows.save()
        say(f"{target}: {len(rows.rows)} rows, {rows.added} of them new" + (f", {known} known before" if known else ""))
    if rows.busy:
        say(f"{rows.busy} rows were timed under external load: the next run on an idle machine re-times them")
    if as_json:
        groups = [{"group": s.group, "widths": s.widths, "ms": s.ms, "edges": s.edges} for s in curves]
        counts = {"rows": len(rows.rows), "added": rows.added, "timed_under_load": rows.busy}
        print_json({"table": target, **counts, "total_ms": total, "groups": groups})
        return
    say(f"sum of the layers' times: {total:.3f} ms")
    for s in curves:
        steps = "  ".join(f"{w}:{t:.4g}" + ("" if w in s.edges else "-") for w, t in zip(s.widths, s.ms, strict=True))
        say(f"{s.group} ({s.widths[-1]}): {steps}")
    say("units kept : ms of the affected layers; a minus marks a width that is no faster than a wider one")

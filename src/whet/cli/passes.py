"""`whet passes`: the graph passes in running order."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--level", type=click.IntRange(0, 5), default=3, show_default=True, help="Mark what this --builderOptimizationLevel runs.")
@click.option("--passes", "switches", default="", help="Switches to try: none, all, -name, +name, comma separated.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def command(level: int, switches: str, as_json: bool) -> None:
    """List the graph passes in the order in which they run.

    Switch single ones in a build with --passes=-fuse_conv_add,+name or all with --passes=none.
    """
    from whet.passes import ordered, select

    chosen = {p.name for p in select(level, [s for s in switches.split(",") if s])}
    rows = [
        {"name": p.name, "phase": p.phase.name, "level": p.level, "after": list(p.after), "on": p.name in chosen, "what": p.doc}
        for p in ordered()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from rich.table import Table

    from whet.cli._console import console

    table = Table(box=None, header_style="bold")
    for column in ("", "pass", "phase", "from level", "what it does"):
        table.add_column(column)
    for r in rows:
        table.add_row("on" if r["on"] else "-", str(r["name"]), str(r["phase"]), str(r["level"]), str(r["what"]))
    console().print(table)

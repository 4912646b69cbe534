"""`whet passes`: lists the graph passes in execution order."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--level", type=click.IntRange(0, 5), default=3, show_default=True, help="Mark the passes that this --builderOptimizationLevel runs.")
@click.option("--passes", "switches", default="", help="Switches to try: none, all, -name, +name, comma separated.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
def command(level: int, switches: str, as_json: bool) -> None:
    """List the graph passes in execution order.

    Switch single passes of a build with --passes=-fuse_conv_add,+name or all with --passes=none.
    """
    from whet.passes import ordered, select

    chosen = {p.name for p in select(level, [s for s in switches.split(",") if s])}
    rows = [
        {"name": p.name, "composite": p.composite, "phase": p.phase.name, "level": p.level, "after": list(p.after),
         "on": p.name in chosen, "what": p.doc}
        for p in ordered()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from whet.cli._console import console, print_table

    cells = [["on" if r["on"] else "-", r["name"], r["phase"], str(r["level"]), r["what"]] for r in rows]
    print_table(console(), ["", "pass", "phase", "from level", "what it does"], cells, below=("what it does",))

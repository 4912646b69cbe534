"""`whet passes`: lists the graph passes in execution order, or dumps a network after each pass."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from whet.cli._prune_flags import build_config, build_flags


@click.command()
@click.argument("model", required=False, type=click.Path(dir_okay=False))
@click.option("--level", type=click.IntRange(0, 5), default=3, show_default=True, help="Mark (or run) the passes of this --builderOptimizationLevel.")
@click.option("--passes", "switches", default="", help="Switches to try: none, all, -name, +name, comma separated.")
@click.option("--dump", type=click.Path(file_okay=False), help="With MODEL or an engine: folder for the network after each pass, as text and ONNX.")
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
@build_flags
def command(model: str | None, level: int, switches: str, dump: str | None, as_json: bool, **build: Any) -> None:
    """List the graph passes in execution order, or write MODEL as each pass changes it: whet passes model.onnx --dump=DIR.

    Switch single passes of a build with --passes=-fuse_conv_add,+name or all with --passes=none. --dump writes the network before the passes, after
    each pass that fired, and lowered. The ONNX files are for viewers such as Netron: a fused layer is a function that can be opened, and all files
    share weights.bin. Of an engine its lowered network is written. Nothing is built or timed.
    """
    from whet.errors import UsageError
    from whet.passes import order_passes, select

    if (model is None) != (dump is None):
        raise UsageError("give both a model (or an engine) and --dump=DIR to write networks, or neither to list the passes")
    chosen_switches = [s for s in switches.split(",") if s]
    if model is not None and dump is not None:
        from whet.cli._dump import dump_passes

        config = dataclasses.replace(build_config(**build), optimization_level=level, passes=tuple(chosen_switches))
        files = dump_passes(model, dump, config)
        if as_json:
            click.echo(json.dumps([str(f) for f in files], indent=1))
        else:
            click.echo("\n".join(map(str, files)))
        return
    chosen = {p.name for p in select(level, chosen_switches)}
    rows = [
        {"name": p.name, "composite": p.composite, "phase": p.phase.name, "level": p.level, "after": list(p.after),
         "on": p.name in chosen, "what": p.doc}
        for p in order_passes()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    from whet.cli._console import make_console, print_table

    cells = [["on" if r["on"] else "-", r["name"], r["phase"], str(r["level"]), r["what"]] for r in rows]
    print_table(make_console(), ["", "pass", "phase", "from level", "what it does"], cells, below=("what it does",))

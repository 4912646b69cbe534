"""`whet auto`: searches for the fastest sufficiently accurate model on this machine and writes it to a folder that can be deployed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

_ROOMY = 100  # columns of a terminal in which all of a table stands side by side
_SPARED = (">p99 ms", ">samples/s")  # in a narrower one these stand in the report alone
MISSED = 3  # exit code: an engine was found and deployed, but the target is not met


@click.command(short_help="Prune, quantize, build and measure until a target is met; leaves a deploy folder.")
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--out", type=click.Path(file_okay=False), help="Work folder (default: the recipe's `out`, else NAME.auto beside it).")
@click.option("--trials", type=click.IntRange(1), help="How many trials in all (default: the recipe's search.trials).")
@click.option("--timeout", help="After so long (90 s, 15 min, 2 h) no new trial begins; the survivors still get their effort.")
@click.option("--workers", type=click.IntRange(1), help="Trials at once (default: one on a CPU, one a GPU).")
@click.option("--resume/--fresh", default=True, show_default=True, help="Go on with what is in the work folder, or throw it away.")
@click.option("--ray", help="Run trials on Ray: `auto` (a cluster that runs, else this machine) or an address.")
@click.option("--dry-run", is_flag=True, help="Say what would be searched; read model and data, build nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the dry run) as JSON on standard output.")
def command(
    recipe: str,
    out: str | None,
    trials: int | None,
    timeout: str | None,
    workers: int | None,
    resume: bool,
    ray: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Search for the best model for this machine: pruning, depth, 2:4, precision, fusion and batch, judged by the built engine's measured time.

    RECIPE is a YAML file: model, data, metric, device, target (docs/auto.md). The search can be killed at any moment: the same command goes
    on. Exit code 0: the target is met; 3: it is not, and the nearest engine is deployed; 1 and 2: an error.
    """
    from whet.search import load_recipe

    r = load_recipe(recipe)
    if out is not None:
        from pathlib import Path

        r = dataclasses.replace(r, out=str(Path(out).resolve()))
    changed: dict[str, Any] = {"trials": trials, "workers": workers, "timeout": _seconds(timeout) if timeout else None}
    r = dataclasses.replace(r, search=dataclasses.replace(r.search, **{k: v for k, v in changed.items() if v is not None}))
    if dry_run:
        from whet.search import dry_run as look

        facts = look(r)
        click.echo(json.dumps(facts, indent=1) if as_json else _dry_text(facts))
        return 0
    from whet.report.search_live import SearchLive
    from whet.search import search
    from whet.search.outcome.deploy import deploy_data

    with SearchLive(live=sys.stderr.isatty()) as live:
        found = search(r, fresh=not resume, watcher=live, ray=ray)
    data = deploy_data(found.folder.deploy)
    if as_json:
        click.echo(json.dumps(data, indent=1))
    else:
        _tell(found, data)
    return 0 if found.met else MISSED


def _seconds(text: str) -> float:
    from whet.search.recipe.fields import seconds

    return float(seconds(text, "--timeout"))


def _tell(found: Any, data: dict[str, Any]) -> None:
    """The compared engines as a table, the verdict, where things lie."""
    from rich.text import Text

    from whet.cli._console import console, print_table
    from whet.report._html import number

    metered = any(r["energy"]["mj"] is not None for r in data["rows"])
    columns = ["engine", "what", f">{data['metric']}", ">lost", ">median ms", ">p99 ms", ">x original", ">samples/s", ">MiB", "target"]
    columns += [">mJ", ">net mJ"] if metered else []
    out = console()
    shown = [i for i, c in enumerate(columns) if out.width >= _ROOMY or c not in _SPARED]
    rows = []
    for i, r in enumerate(data["rows"]):
        ms = r["latency"]
        missed = "; ".join(c["text"] for c in r["checks"] if not c["met"])
        cells = [
            r["name"], r["what"], number(r["metric"]["value"], 4), number(r["drop"]["value"]), number(ms["median_ms"]), number(ms["p99_ms"]),
            number(ms["ratio"]), number(r["throughput"]), number(r["memory_bytes"] / 2**20), missed or "met",
        ]  # fmt: skip
        cells += [number(r["energy"].get(k)) for k in ("mj", "net_mj")] if metered else []
        rows.append([Text(str(cells[k]), style="bold" if i == data["chosen"] else "") for k in shown])
    print_table(out, [columns[k] for k in shown], rows, f"{data['model']} on {data['device']}", below=("target", "what"))
    out.print(f"Energy{' of the original' if metered else ''}: {data['rows'][0]['energy']['about']}.")
    for text in data["warnings"]:
        out.print(Text(text, style="yellow"))
    chosen = data["rows"][data["chosen"]]["name"]
    out.print(f"The target is met by {chosen}." if found.met else f"The target is NOT met; {chosen} comes nearest. Exit code {MISSED}.")
    click.echo(f"Deployed: {found.folder.deploy} (report.html, README.md)")
    click.echo(f"Run it:   whet exec --loadEngine={found.folder.deploy / 'model.engine'}")


def _dry_text(facts: dict[str, Any]) -> str:
    """The dry run for people."""
    lines = [f"model      {facts['model']}", f"device     {facts['device']}, {facts['workers']} at once"]
    lines.append("target     " + ", ".join(f"{k} {v}" for k, v in facts["target"].items()) + f"; prefers {facts['prefer']}")
    lines.append("data       " + ", ".join(f"{k}: {v if isinstance(v, int) else 'inputs ' + str(v)}" for k, v in facts["data"].items()))
    timeout = "" if facts["timeout"] is None else f", no new one after {facts['timeout']:g} s"
    lines.append(f"trials     {facts['trials']}{timeout}; {facts['survivors']} survive; baselines: {'; '.join(facts['baselines'])}")
    lines.append(f"space      {facts['points']:,} points")
    for name, values in facts["space"].items():
        members = facts["classes"].get(name, [])
        shown = values if isinstance(values, str) else ", ".join(map(str, values))
        lines.append(f"  {name}: {shown}" + (f"  ({len(members)} groups)" if members else ""))
    lines += [f"not varied {what}: {why}" for what, why in facts["left_out"]]
    lines += [f"note       {text}" for text in facts["advice"]]
    lines.append(f"folder     {facts['folder']} ({'a search is there: it goes on' if facts['resumed'] else 'new'})")
    return "\n".join(lines)

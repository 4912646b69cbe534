"""`whet auto`: searches for the fastest sufficiently accurate model on this machine and writes it to a folder that can be deployed."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click

_WIDE_TERMINAL = 100  # columns of a terminal in which the whole table fits
_WIDE_ONLY = (">p99 ms", ">samples/s")  # columns left out in narrower terminals; the report has them
MISSED = 3  # exit code: an engine was deployed, but it misses the target


@click.command(short_help="Prune, quantize, build and measure until a target is met; leaves a deploy folder.")
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--out", type=click.Path(file_okay=False), help="Work folder (default: the recipe's `out`, else NAME.auto next to the recipe).")
@click.option("--trials", type=click.IntRange(1), help="Total number of trials (default: the recipe's search.trials).")
@click.option("--timeout", help="Start no new trial after this time (90 s, 15 min, 2 h); the surviving candidates are still finished.")
@click.option("--workers", type=click.IntRange(1), help="Concurrent trials (default: one on a CPU, one per GPU).")
@click.option("--early-stop/--no-early-stop", default=None,
              help="Build no engine for a trial that loses more than five times the permitted accuracy after recovery (default: the recipe's "
                   "search.early_stop, which is on).")
@click.option("--resume/--fresh", default=True, show_default=True, help="Continue the search in the work folder, or discard it.")
@click.option("--ray", help="Run trials on Ray: `auto` (a running cluster, else this machine) or an address.")
@click.option("--dry-run", is_flag=True, help="Print the search space; read model and data, build nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the dry run) as JSON on standard output.")
def command(
    recipe: str,
    out: str | None,
    trials: int | None,
    timeout: str | None,
    workers: int | None,
    early_stop: bool | None,
    resume: bool,
    ray: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Search for the best model on this machine over pruning, depth, 2:4, precision, fusion and batch, by the measured time of built engines.

    RECIPE is a YAML file: model, data, metric, device, target (docs/auto.md). A search that was killed continues with the same command.
    Exit code 0: the target is met; 3: it is not, and the nearest engine is deployed; 1 and 2: an error.
    """
    from whet.search import load_recipe

    r = load_recipe(recipe)
    if out is not None:
        from whet.files import resolve_path

        r = dataclasses.replace(r, out=str(resolve_path(out)))
    changed: dict[str, Any] = {"trials": trials, "workers": workers, "timeout": _parse_seconds(timeout) if timeout else None,
                               "early_stop": early_stop}  # fmt: skip
    r = dataclasses.replace(r, search=dataclasses.replace(r.search, **{k: v for k, v in changed.items() if v is not None}))
    if dry_run:
        from whet.search import dry_run as describe_search

        facts = describe_search(r)
        click.echo(json.dumps(facts, indent=1) if as_json else _format_dry_run(facts))
        return 0
    from whet.progress_lines import ProgressLines
    from whet.report.search_live import SearchLive
    from whet.search import search
    from whet.search.outcome.deploy import deploy_data

    with SearchLive(live=sys.stderr.isatty()) as live, ProgressLines("" if live.live else live.summary):
        outcome = search(r, fresh=not resume, watcher=live, ray=ray)
    data = deploy_data(outcome.folder.deploy)
    if as_json:
        click.echo(json.dumps(data, indent=1))
    else:
        print_outcome(outcome, data)
    return 0 if outcome.met else MISSED


def _parse_seconds(text: str) -> float:
    from whet.search.recipe.fields import read_seconds

    return float(read_seconds(text, "--timeout"))


def print_outcome(outcome: Any, data: dict[str, Any]) -> None:
    """Prints the compared engines as a table, the verdict, and the paths of the results."""
    from rich.text import Text

    from whet.cli._console import make_console, print_table
    from whet.report._html import format_digits
    from whet.report.search_page import format_ratio

    metered = any(r["energy"]["mj"] is not None for r in data["rows"])
    columns = ["engine", "what", f">{data['metric']}", ">lost", ">median ms", ">p99 ms", ">x original", ">samples/s", ">MiB", "target"]
    columns += [">mJ", ">net mJ"] if metered else []
    out = make_console()
    shown = [i for i, c in enumerate(columns) if out.width >= _WIDE_TERMINAL or c not in _WIDE_ONLY]
    rows = []
    for i, r in enumerate(data["rows"]):
        ms = r["latency"]
        missed = "; ".join(c["text"] for c in r["checks"] if not c["met"])
        cells = [
            r["name"], r["what"], format_digits(r["metric"]["value"], 4), format_digits(r["drop"]["value"]),
            format_digits(ms["median_ms"]), format_digits(ms["p99_ms"]),
            format_ratio(ms), format_digits(r["throughput"]), format_digits(r["memory_bytes"] / 2**20), missed or "met",
        ]  # fmt: skip
        cells += [format_digits(r["energy"].get(k)) for k in ("mj", "net_mj")] if metered else []
        rows.append([Text(str(cells[k]), style="bold" if i == data["chosen"] else "") for k in shown])
    print_table(out, [columns[k] for k in shown], rows, f"{data['model']} on {data['device']}", below=("target", "what"))
    out.print(f"Energy{' of the original' if metered else ''}: {data['rows'][0]['energy']['about']}.")
    for text in data["warnings"]:
        out.print(Text(text, style="yellow"))
    chosen = data["rows"][data["chosen"]]["name"]
    out.print(f"The target is met by {chosen}." if outcome.met else f"The target is NOT met; {chosen} comes nearest. Exit code {MISSED}.")
    click.echo(f"Deployed: {outcome.folder.deploy} (report.html, README.md)")
    click.echo(f"Run it:   whet exec --loadEngine={outcome.folder.deploy / 'model.engine'}")


def _format_dry_run(facts: dict[str, Any]) -> str:
    """The text of a dry run."""
    lines = [f"model      {facts['model']}", f"device     {facts['device']}, {facts['workers']} concurrent"]
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
    lines.append(f"folder     {facts['folder']} ({'has a search that is continued' if facts['resumed'] else 'new'})")
    return "\n".join(lines)

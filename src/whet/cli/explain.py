"""`whet explain`: why an engine, or one of its layers, runs the way it does."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command()
@click.argument("engine", type=click.Path(dir_okay=False))
@click.argument("layer", required=False)
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="How many layers, candidates and skips to show.")
@click.option("--layers", is_flag=True, help="The whole layer table, in the order of running.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for scripts.")
def command(engine: str, layer: str | None, top: int, layers: bool, as_json: bool) -> None:
    """Show what an engine does and why: slowest layers, tactics, passes that fired and those that did not, with reasons.

    With LAYER (a layer's name, or a node of your model): its candidates with times, the refusals with reasons, the passes that saw it.
    """
    from whet.engine import read_engine
    from whet.inspector import explain, layer_rows

    plan = read_engine(engine)
    data = explain(plan, layer)
    if as_json:
        click.echo(json.dumps({**data, "layer_table": layer_rows(plan)} if layers else data, indent=1, default=str))
        return
    from whet.cli._console import console as make_console

    console = make_console()
    if layer is not None:
        _layer(console, data, top)
    else:
        _engine(console, data, top)
        if layers:
            print_layers(console, layer_rows(plan))


def print_layers(console: Any, rows: list[dict[str, str]]) -> None:
    """The layer table in the order of running."""
    from whet.inspector import COLUMNS

    table = _table([c if c not in ("ms", "share", "GFLOP/s", "MB") else f">{c}" for c in COLUMNS], "Layers")
    for r in rows:
        table.add_row(*(r[c] for c in COLUMNS))
    console.print(table)


def _table(columns: list[str], title: str = "") -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold cyan", pad_edge=False)
    for c in columns:
        table.add_column(c.lstrip(">"), justify="right" if c.startswith(">") else "left", overflow="fold")
    return table


def _ms(v: float | None) -> str:
    return "-" if v is None else f"{v:.4f}"


def _engine(console: Any, d: dict[str, Any], top: int) -> None:
    arena = ", ".join(f"{b / 2**20:.1f} MiB" for b in d["arena_bytes"])
    model = d["machine"].get("model", "?")
    console.print(f"[bold]{d['network']}[/] on {d['backend']} ({model}), {d['threads']} thread(s)", highlight=False)
    console.print(
        f"{d['layers']} layers, {d['reformats']} of them reformats; {_ms(d['latency_ms'])} ms as a whole; "
        f"{d['flops'] / 1e9:.2f} GFLOP, {d['bytes'] / 1e6:.1f} MB moved; arena {arena}",
        highlight=False,
    )
    choice = d["choice"]
    if choice:
        shown = (f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in choice.items())
        console.print("Choice of formats and tactics: " + ", ".join(shown), highlight=False)
    for e in d["engines"]:
        console.print(f"  whole engine timed: {_ms(e.get('ms'))} ms  {e.get('what', '')}", highlight=False)
    table = _table([">ms", ">share", "layer", "type", "tactic", "kernel", "bound"], f"Slowest {min(top, d['layers'])} layers")
    for r in d["slowest"][:top]:
        share = "" if r["percent"] is None else f"{r['percent']:.1f}%"
        table.add_row(_ms(r["ms"]), share, r["name"], r["type"], r["tactic"], r["kernel"], r["bound"] or "")
    console.print(table)
    table = _table([">ms", ">share", ">layers", "tactic"], "By tactic")
    for r in d["by_tactic"]:
        table.add_row(_ms(r["ms"]), "" if r["percent"] is None else f"{r['percent']:.1f}%", str(r["layers"]), r["tactic"])
    console.print(table)
    fired = ", ".join(f"{n} x{k}" for n, k in d["passes_fired"].items() if k)
    console.print(f"[bold cyan]Passes that fired[/] {fired or 'none'}", highlight=False)
    _skips(console, d["skips"], top)
    for name, what, why in d["banned"]:
        console.print(f"[red]banned[/] {name} by {what}: {why}", highlight=False)
    for text in d["notes"]:
        console.print(f"[yellow]note[/] {text}", highlight=False)
    for text in d["info"]:
        console.print(f"[cyan]found[/] {text}", highlight=False)


def _skips(console: Any, skips: list[dict[str, Any]], top: int) -> None:
    if not skips:
        return
    console.print("[bold cyan]Passes that saw their pattern and did not fire[/]")
    for s in skips[:top]:
        console.print(f"  {s['pass']} at {s['layer'] or 'the network'}: {s['reason']}", highlight=False)
    if len(skips) > top:
        console.print(f"  and {len(skips) - top} more (--top, or --json for all)", highlight=False)


def _layer(console: Any, d: dict[str, Any], top: int) -> None:
    console.print(f"[bold]{d['name']}[/]  {d['type']}", highlight=False)
    console.print(f"from {', '.join(d['sources']) or 'nothing of the model: the builder put it there'}", highlight=False)
    for kind in ("inputs", "outputs"):
        for t in d[kind]:
            console.print(f"  {kind[:-1]} {t['name']}: {t['type']} stored as {t['stored']}", highlight=False)
    console.print(
        f"runs on [green]{d['tactic']}[/] ({d['kernel']}): {_ms(d['ms'])} ms in the engine, {d['flops'] / 1e6:.1f} MFLOP, "
        f"{d['bytes'] / 1e3:.1f} kB moved, bound by {d['bound'] or 'nothing known'}",
        highlight=False,
    )
    console.print(d["why"], highlight=False)
    if d["candidates"]:
        table = _table([">ms", ">spread", "tactic", "kernel", "formats", "why not"], f"Timed ({len(d['candidates'])})")
        for c in d["candidates"][:top]:
            table.add_row(_ms(c["ms"]), _ms(c["spread_ms"]), c["tactic"], c["implementation"], c["signature"], c["reason"])
        console.print(table)
    if d["refused"]:
        table = _table(["tactic", "formats", "reason"], f"Refused ({len(d['refused'])})")
        for c in d["refused"][:top]:
            table.add_row(c["tactic"], c["signature"], c["reason"])
        console.print(table)
        if len(d["refused"]) > top:
            console.print(f"and {len(d['refused']) - top} more (--top, or --json for all)", highlight=False)
    for p in d["passes_fired"]:
        console.print(f"pass {p['pass']}: {p['what']}", highlight=False)
    _skips(console, d["skips"], top)

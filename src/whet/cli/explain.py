"""`whet explain`: shows the decisions of an engine or of one of its layers, with their reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from whet.cli._console import make_console as make_console
from whet.cli._console import print_indented, print_table, style_text
from whet.cli._exec_values import format_shape


@click.command()
@click.argument("engine", type=click.Path(dir_okay=False))
@click.argument("layer", required=False)
@click.option("--top", type=click.IntRange(1), default=12, show_default=True, help="Number of layers, candidates and skips to show.")
@click.option("--layers", is_flag=True, help="Print the whole layer table in execution order.")
@click.option("--profile", type=click.IntRange(0), default=0, show_default=True, help="Profile to show, if profiles were tuned separately.")
@click.option("--json", "as_json", is_flag=True, help="Full JSON output.")
def command(engine: str, layer: str | None, top: int, layers: bool, profile: int, as_json: bool) -> None:
    """Show an engine's decisions: slowest layers, tactics, passes that fired and passes that did not, with reasons.

    With LAYER (a layer's name, or a node of the model): its timed candidates, refused tactics with reasons, and passes that matched it.
    """
    from whet.engine import read_engine
    from whet.errors import UsageError
    from whet.inspector import explain, layer_facts, layer_rows
    from whet.inspector.summary import WIDTH, describe_verification

    if (path := Path(engine)).suffix == ".onnx":
        target = path.with_suffix(".engine").name
        raise UsageError(f"{engine} is a model, not an engine: whet exec --onnx={engine} --saveEngine={target}, then whet explain {target}")
    plan = read_engine(engine)
    if profile >= max(len(plan.profiles), 1):
        raise UsageError(f"--profile={profile}: the engine has {max(len(plan.profiles), 1)} profile(s), numbered from 0")
    several = _describe_profiles(plan, profile)
    plan = plan.part(profile)[0] if profile else plan.by_profile()[0]
    data = explain(plan, layer)
    if as_json:
        click.echo(json.dumps({**data, "layer_table": layer_rows(plan)} if layers else data, indent=1, default=str))
        return
    console = make_console()
    console.width = min(console.width, WIDTH)
    if several:
        console.print(several)
    if layer is not None:
        _print_layer(console, data, top)
    else:
        _print_engine(console, data, top, describe_verification(plan))
        if layers:
            print_layers(console, layer_facts(plan))


def _describe_profiles(plan: Any, shown: int) -> str:
    """Describes the profiles of an engine with several, and names the one shown."""
    if len(plan.profiles) < 2:
        return ""

    def format_range(name: str, low: tuple[int, ...], opt: tuple[int, ...], high: tuple[int, ...]) -> str:
        return f"{name} {format_shape(low)} to {format_shape(high)}, tuned for {format_shape(opt)}"

    ranges = [", ".join(format_range(n, *shapes) for n, shapes in p.shapes.items()) for p in plan.profiles]
    which = f"this is profile {shown} (--profile for another)" if plan.others else "all share the same tactics"
    return f"Profiles: {'; '.join(f'{k}: {text}' for k, text in enumerate(ranges))}; {which}"


def print_layers(console: Any, facts: list[Any]) -> None:
    """Prints the layer table in execution order, one line a layer."""
    from whet.inspector.summary import COLUMNS, make_layer_table

    print_table(console, COLUMNS, make_layer_table(facts, sum(f.ms or 0.0 for f in facts)), "Layers")


def _format_ms(v: float | None) -> str:
    return "-" if v is None else f"{v:.4f}"


def _share(row: dict[str, Any]) -> str:
    return "" if row["percent"] is None else f"{row['percent']:.1f}%"


def _print_engine(console: Any, d: dict[str, Any], top: int, verified: str) -> None:
    from whet.inspector.summary import shorten_cells

    arena = ", ".join(f"{b / 2**20:.1f} MiB" for b in d["arena_bytes"])
    model = d["machine"].get("model", "?")
    console.print(style_text((d["network"], "bold"), f" on {d['backend']} ({model}), {d['threads']} thread(s)"))
    whole = "not timed as a whole" if d["latency_ms"] is None else f"{_format_ms(d['latency_ms'])} ms as a whole"
    console.print(
        f"{d['layers']} layers, {d['reformats']} of them reformats; {whole}; "
        f"{d['flops'] / 1e9:.2f} GFLOP, {d['bytes'] / 1e6:.1f} MB moved; arena {arena}"
    )
    console.print(f"Checked: {verified}")
    if any(d["lanes"]):
        many = max(d["lanes"]) > 1 or d["threads"] == 1
        how, threads = (f"in parallel, {max(d['lanes'])} at once", "on one thread") if many else ("one after the other", "on all threads")
        text = f"Samples run {how}: layers, GFLOP and MB are those of one sample, ms {threads}"
        console.print(text)
    elif why := d["samples"].get("why"):
        console.print(f"The samples of a batch run together: {why}")
    if d["choice"]:
        console.print(describe_selection(d["choice"]))
    if d["engines"]:
        rows = [[_format_ms(e["ms"]), _format_ms(e["spread_ms"]), e["what"]] for e in d["engines"]]
        title = "Whole engines timed; the first is kept, and replaced only by one that is faster beyond the noise"
        print_table(console, [">ms", ">spread", "engine"], rows, title)
    columns = [">ms", ">share", "layer", "tactic", "kernel", "bound"]
    rows = [[_format_ms(r["ms"]), _share(r), r["name"], r["tactic"], r["kernel"], r["bound"] or ""] for r in d["slowest"][:top]]
    if d["disturbed"]:
        console.print(style_text(("note", "yellow"), f" {d['disturbed']}"))
    title = f"Slowest {len(rows)} layers" if d["sum_of_layers_ms"] else f"{len(rows)} layers; none was timed"
    print_table(console, columns, shorten_cells(columns, rows), title)
    rows = [[_format_ms(r["ms"]), _share(r), str(r["layers"]), r["tactic"]] for r in d["by_tactic"]]
    print_table(console, [">ms", ">share", ">layers", "tactic"], rows, "By tactic")
    fired = ", ".join(f"{n} x{k}" for n, k in d["passes_fired"].items() if k)
    console.print(style_text(("Passes that fired", "bold cyan"), f" {fired or 'none'}"))
    _print_skips(console, d["skips"], top)
    for name, what, why in d["banned"]:
        console.print(style_text(("banned", "red"), f" {name} by {what}: {why}"))
    for text in d["notes"]:
        console.print(style_text(("note", "yellow"), f" {text}"))
    for text in d["info"]:
        console.print(style_text(("found", "cyan"), f" {text}"))


def describe_selection(choice: dict[str, Any]) -> str:
    """How formats and tactics were selected, in one sentence; the other search methods with the sums that they reached."""
    total = choice.get("sum_of_layers_ms")
    method, _, then = choice["method"].partition(", ")
    found = {"exact": "the exact minimum", "lock": "those of the lock"}.get(method, f"the best that the {method} search found")
    parts = [f"Formats and tactics: {found}" + (f" of the sum of layer times, {total:.4f} ms" if total is not None else "")]
    parts += [then] if then else []
    parts += [f"{name.removesuffix(' ms')} search: {ms:.4f} ms" for name, ms in choice.items() if name.endswith(" ms")]
    if choice.get("core_layers"):
        parts.append(f"{choice['core_layers']} layers could not be reduced exactly")
    if choice.get("engines_timed"):
        parts.append(f"times of whole engines: {choice['engines_timed']}")
    return "; ".join(parts)


def _print_skips(console: Any, skips: list[dict[str, Any]], top: int) -> None:
    if not skips:
        return
    console.print(style_text(("Passes that matched their pattern and did not fire", "bold cyan")))
    alike: dict[tuple[str, str], list[str]] = {}
    for s in skips:
        alike.setdefault((s["pass"], s["reason"]), []).append(s["layer"] or "the network")
    for (name, reason), layers in list(alike.items())[:top]:
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        print_indented(console, f"{name}: {reason}; at {layers[0]}{more}")
    if len(alike) > top:
        print_indented(console, f"and {len(alike) - top} more (--top, or --json for all)")


def _print_layer(console: Any, d: dict[str, Any], top: int) -> None:
    console.print(style_text((d["name"], "bold"), f"  {d['type']}" + (f", {d['title']}" if d["title"] else "")))
    console.print(f"from {', '.join(d['sources']) or 'no node of the model: added by the builder'}")
    for kind in ("inputs", "outputs"):
        for t in d[kind]:
            console.print(f"  {kind[:-1]} {t['name']}: {t['type']} stored as {t['stored']}")
    work = f"{d['flops'] / 1e6:.1f} MFLOP, {d['bytes'] / 1e3:.1f} kB moved, bound by {d['bound'] or 'unknown'}"
    console.print(style_text("runs on ", (d["tactic"], "green"), f" ({d['kernel']}): {_format_ms(d['ms'])} ms in the engine, {work}"))
    console.print(d["why"])
    if d["sparsity"]:
        console.print(d["sparsity"]["Text"])
    if d["candidates"]:
        cold = [">cold"] if any(c["cold_ms"] is not None for c in d["candidates"]) else []
        columns = [">ms", ">spread", *cold, "tactic", "kernel", "formats", "why not"]
        rows = [
            [
                _format_ms(c["ms"]),
                _format_ms(c["spread_ms"]),
                *(_format_ms(c["cold_ms"]) for _ in cold),
                c["tactic"],
                c["implementation"],
                c["signature"],
                c["reason"],
            ]
            for c in d["candidates"][:top]
        ]
        print_table(console, columns, rows, f"Timed ({len(d['candidates'])})", below=("formats", "why not"))
        if cold:
            console.print("cold: the kernel's weights are read from memory, not from the L2 cache; measured for finalists only")
    _print_refusals(console, d, top)
    for p in d["passes_fired"]:
        console.print(f"pass {p['pass']}: {p['what']}")
    _print_skips(console, d["skips"], top)


def _print_refusals(console: Any, d: dict[str, Any], top: int) -> None:
    """Prints the tactics that refuse the layer; tactics for other operators are only counted."""
    from whet.inspector.summary import select_relevant_refusals

    relevant, others = select_relevant_refusals(d)
    if relevant:
        rows = [[c["tactic"], c["signature"], c["reason"]] for c in relevant[:top]]
        print_table(console, ["tactic", "formats", "reason"], rows, f"Refused ({len(relevant)})", below=("formats", "reason"))
    if len(relevant) > top:
        console.print(f"and {len(relevant) - top} more (--top, or --json for all)")
    if others:
        console.print(f"{others} tactics are for other operators (--json lists them)")

"""`whet diff`: differences of two engines or locks in tactics, types, fusion and options; nothing is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("first", type=click.Path(dir_okay=False))
@click.argument("second", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="JSON output.")
def command(first: str, second: str, as_json: bool) -> None:
    """Show how two engines or two locks differ: options, fusion, tactics, types.

    Nothing is run; `whet compare` times engines. Layers are aligned by the nodes of the model that they compute.
    The exit code is 1 if there are differences, 0 if there are none.
    """
    from whet.cli._compare_engines import print_aligned
    from whet.cli._console import make_console
    from whet.cli._runners import is_engine
    from whet.errors import UsageError
    from whet.inspector.alignment import align_layers, find_differing_settings, format_setting

    kinds = [is_engine(p) for p in (first, second)]
    if kinds[0] != kinds[1]:
        raise UsageError(f"{first} and {second}: one is an engine, the other is not; give two engines or two locks")
    out = make_console()
    for path in (first, second):
        if Path(path).suffix == ".onnx":
            raise UsageError(f"{path} is a model; give two engines or two locks. `whet compare` builds models and compares their engines.")
    if not kinds[0]:
        layers = _list_lock_differences(first, second)
        if as_json:
            click.echo(json.dumps({"layers": layers}, indent=1))
        for row in layers if not as_json else []:
            out.print(f"{row['layer']}: {row['first']} -> {row['second']}")
        _exit_if_different(out, bool(layers), as_json)
        return
    from whet.engine import read_engine

    plans = [read_engine(p) for p in (first, second)]
    options = find_differing_settings(plans)
    aligned = [a for a in align_layers(plans) if not a.same_choices]
    if as_json:
        click.echo(json.dumps({"options": options, "layers": [a.to_dict() for a in aligned]}, indent=1, default=str))
    else:
        for name, (a, b) in options.items():
            out.print(f"{name}: {format_setting(a)} -> {format_setting(b)}")
        if aligned:
            print_aligned(out, ["first", "second"], aligned, "as recorded by the builds")
    _exit_if_different(out, bool(options or aligned), as_json)


def _exit_if_different(out: Any, different: bool, as_json: bool) -> None:
    if different:
        click.get_current_context().exit(1)
    if not as_json:
        out.print("No differences.")


def _list_lock_differences(first: str, second: str) -> list[dict[str, str]]:
    """The layers that two locks choose differently. Raises LockError for files that are no locks."""
    from whet.builder.lock.lock import read_lock

    a, b = ({x["name"]: x for x in read_lock(p)["layers"]} for p in (first, second))

    def show(entry: dict[str, Any] | None) -> str:
        return "-" if entry is None else json.dumps({k: v for k, v in entry.items() if k != "name"})

    return [{"layer": n, "first": show(a.get(n)), "second": show(b.get(n))} for n in dict.fromkeys((*a, *b)) if a.get(n) != b.get(n)]

"""`whet report`: an engine, a comparison or a search as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whet.cli._console import print_json

_SOURCES = "an engine, a search's report.json, or the JSON of `whet compare`, `whet sparsity` or `whet debug precision`"


@click.command(short_help="Write an HTML page about an engine, a comparison, a search or an analysis.")
@click.argument("source", type=click.Path())
@click.option("--html", type=click.Path(), help="File to write (default: the source's name with .html, in the current folder).")
@click.option("--profile", type=click.IntRange(0), default=0, show_default=True, help="Engine: the optimization profile to show.")
@click.option("--json", "as_json", is_flag=True, help="Print the path and the size of the page as JSON.")
def command(source: str, html: str | None, profile: int, as_json: bool) -> None:
    """Write a page about SOURCE: an engine, the report.json of `whet auto`, or the JSON of `whet compare --json`, `whet sparsity --json` or
    `whet debug precision --json`.

    An engine's page shows its graph with fused groups, time by layer and type, the roofline, precision and sparsity, memory over time, and
    for a selected layer all candidates with times and refusals with reasons. The page is one file without network access. Nothing is run:
    times are those that the build recorded.
    """
    from whet.cli._output_files import check_page, write_page
    from whet.errors import UsageError

    path = Path(html) if html is not None else Path(Path(source).stem + ".html")
    if not Path(source).is_file():
        raise UsageError(f"there is no file {source}; give {_SOURCES}")
    check_page(source, html=str(path))
    write_page(path, _make_page(source, profile))
    if as_json:
        print_json({"page": str(path), "bytes": path.stat().st_size})
    else:
        click.echo(f"Wrote {path} ({path.stat().st_size / 2**20:.1f} MiB): open it in a browser.")


def _make_page(source: str, profile: int) -> str:
    from whet.cli._runners import is_engine
    from whet.errors import UsageError

    if is_engine(source):
        from whet.engine import read_engine
        from whet.report import render_engine_page

        plan = read_engine(source)
        if profile >= max(len(plan.profiles), 1):
            raise UsageError(f"--profile={profile}: the engine has {max(len(plan.profiles), 1)} profile(s), numbered from 0")
        return render_engine_page(plan, title=Path(source).stem, profile=profile)
    from whet.report import render_comparison_page, render_search_page, render_sensitivity_page, render_sparsity_page

    data = _read_json(source)
    known = set(data) if isinstance(data, dict) else set()
    title = Path(source).stem
    try:
        if {"trials", "rows", "steps"} <= known:
            return render_search_page(data)
        if {"engines", "layers"} <= known:
            return render_comparison_page(data, title=title)
        if "settings" in known:
            return render_sparsity_page(data, title=f"{title}: 2:4 sparsity")
        if {"all_db", "rows"} <= known:
            return render_sensitivity_page(data, title=f"{title}: sensitivity")
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        raise UsageError(f"{source} lacks what a report needs ({type(e).__name__}: {e}): it was written by another version, or edited") from e
    raise UsageError(f"{source} is no source of a page; give {_SOURCES}")


def _read_json(source: str) -> Any:
    import json

    from whet.errors import UsageError

    try:
        return json.loads(Path(source).read_text(encoding="utf-8"))
    except UnicodeDecodeError as e:
        raise UsageError(f"{source} is neither an engine nor JSON; build an engine with `whet exec --onnx=MODEL --saveEngine=FILE`") from e
    except ValueError as e:
        raise UsageError(f"{source} is neither an engine nor JSON ({e}); build an engine with `whet exec --onnx=MODEL --saveEngine=FILE`") from e

"""`whet retune`: selects the tactics of an engine again on this machine."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("engine", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (default: replaces the engine after success).")
@click.option("--numThreads", "threads", type=click.IntRange(0), default=0, help="CPU threads; 0: all usable ones.")
@click.option("--timingCacheFile", "cache", type=click.Path(dir_okay=False), help="Timing cache (default: the user's cache folder).")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
def command(engine: str, output: str | None, threads: int, cache: str | None, as_json: bool) -> None:
    """Time every candidate on this machine and select again; network, passes and precisions do not change.

    For an engine from another machine, or after an update of a library or a change of the number of cores.
    """
    from whet.builder.retune import retune
    from whet.cli._build_progress import BuildProgress
    from whet.cli._console import print_json
    from whet.cli._output_files import check_writable
    from whet.engine import read_engine, write_engine

    check_writable(output=output or engine)
    old = read_engine(engine)
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        retuned = retune(old, threads=threads, timing_cache=cache, progress=progress)
    target = output or engine
    write_engine(retuned, target)
    changed = sum(retuned.choices.get(n) != c for n, c in old.choices.items() if n in retuned.choices)
    before, after = old.report.latency_ms, retuned.report.latency_ms
    if as_json:
        print_json({"engine": target, "layers": len(retuned.choices), "changed": changed, "before_ms": before, "after_ms": after})
        return
    times = f"; {after:.4f} ms here" + (f", {before:.4f} ms where it was built" if before else "") if after else ""
    click.echo(f"{target}: {changed} of {len(retuned.choices)} layers changed{times}")

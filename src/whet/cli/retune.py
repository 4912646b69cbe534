"""`whet retune`: tune an engine again on this machine."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("engine", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (default: over the old one, when all is well).")
@click.option("--numThreads", "threads", type=click.IntRange(0), default=0, help="CPU threads; 0: all usable ones.")
@click.option("--timingCacheFile", "cache", type=click.Path(dir_okay=False), help="Timing cache (default: the user's cache folder).")
def command(engine: str, output: str | None, threads: int, cache: str | None) -> None:
    """Time every candidate here and choose again; network, passes and precisions stay as they were built.

    For an engine from another machine, or after a library or the number of cores changed.
    """
    from whet.builder.retune import retune
    from whet.cli._build_progress import BuildProgress
    from whet.cli._written import must_be_writable
    from whet.engine import read_engine, write_engine

    must_be_writable(output=output or engine)
    old = read_engine(engine)
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        made = retune(old, threads=threads, timing_cache=cache, progress=progress)
    target = output or engine
    write_engine(made, target)
    changed = sum(made.choices.get(n) != c for n, c in old.choices.items() if n in made.choices)
    before, after = old.report.latency_ms, made.report.latency_ms
    times = f"; {after:.4f} ms here" + (f", {before:.4f} ms where it came from" if before else "") if after else ""
    click.echo(f"{target}: {changed} of {len(made.choices)} layers run another way now{times}")

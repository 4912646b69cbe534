"""`whet retune`: selects the tactics of an engine again on this machine."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("engine", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (default: replaces the engine after success).")
@click.option("--numThreads", "threads", type=click.IntRange(0), default=0, help="CPU threads; 0: all usable ones.")
@click.option("--timingCacheFile", "cache", type=click.Path(dir_okay=False), help="Timing cache (default: the user's cache folder).")
@click.option("--from-trace", "trace", type=click.Path(dir_okay=False), help="Shapes of runs (whet.load(..., record_shapes=FILE)): tune for the most "
              "frequent ones; other shapes run as before.")
@click.option("--profiles", "most", type=click.IntRange(1, 64), help="With --from-trace: tune for so many shapes at most (default: 4).")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
def command(engine: str, output: str | None, threads: int, cache: str | None, trace: str | None, most: int | None, as_json: bool) -> None:
    """Time every candidate on this machine and select again; network, passes and precisions do not change.

    For an engine from another machine, or after an update of a library or a change of the number of cores.
    """
    from whet.builder.retune import MOST_PROFILES, retune
    from whet.cli._build_progress import BuildProgress
    from whet.cli._console import print_json
    from whet.cli._output_files import check_writable
    from whet.engine import read_engine, write_engine
    from whet.errors import UsageError
    from whet.runtime import read_trace

    if most is not None and trace is None:
        raise UsageError("--profiles counts the shapes of --from-trace=FILE: give that, too")
    check_writable(trace, output=output or engine)
    runs = read_trace(trace) if trace is not None else []
    if trace is not None and not runs:
        raise UsageError(f"--from-trace={trace} holds no runs")
    old = read_engine(engine)
    with BuildProgress(enabled=sys.stderr.isatty()) as progress:
        retuned = retune(old, threads=threads, timing_cache=cache, progress=progress, trace=runs, most_profiles=most or MOST_PROFILES)
    target = output or engine
    write_engine(retuned, target)
    changed = sum(retuned.choices.get(n) != c for n, c in old.choices.items() if n in retuned.choices)
    before, after = old.report.latency_ms, retuned.report.latency_ms
    if as_json:
        tuned = [{n: {"min": lo, "opt": opt, "max": hi} for n, (lo, opt, hi) in p.shapes.items()} for p in retuned.profiles]
        more = {"profiles": tuned} if runs else {}
        print_json({"engine": target, "layers": len(retuned.choices), "changed": changed, "before_ms": before, "after_ms": after} | more)
        return
    for k, p in enumerate(retuned.profiles if runs else ()):
        click.echo(f"profile {k} tuned for {', '.join(f'{n}: ' + 'x'.join(map(str, opt)) for n, (_, opt, _) in p.shapes.items())}")
    times = f"; {after:.4f} ms here" + (f", {before:.4f} ms where it was built" if before else "") if after else ""
    click.echo(f"{target}: {changed} of {len(retuned.choices)} layers changed{times}")

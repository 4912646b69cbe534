"""Log lines and performance summary in trtexec's format, so that parsers of trtexec's log can read them."""

from __future__ import annotations

import datetime
import statistics
from typing import Any

import click

from whet.measure.queries import Measured, compute_percentile


class Log:
    """Prints `[MM/DD/YYYY-HH:MM:SS] [I] text` lines to standard output, or with `as_json` to standard error.

    `verbose`: also the lines of `info` and `detail`. `quiet`: only the summary, warnings and errors. `facts` is the content of the JSON that
    `whet exec --json` prints.
    """

    def __init__(self, verbose: bool = False, as_json: bool = False, quiet: bool = False):
        self.verbose, self.as_json, self.quiet = verbose, as_json, quiet
        self.facts: dict[str, Any] = {}

    def echo(self, text: str) -> None:
        click.echo(text, err=self.as_json)

    def frame(self, text: str) -> None:
        """trtexec's `&&&&` lines around the log."""
        if not self.quiet:
            self.echo(text)

    def line(self, level: str, text: str) -> None:
        stamp = datetime.datetime.now().strftime("%m/%d/%Y-%H:%M:%S")
        for part in text.splitlines() or [""]:
            self.echo(f"[{stamp}] [{level}] {part}")

    def result(self, text: str) -> None:
        """A line that the default output has: requested tables, written files, the performance summary."""
        if not self.quiet:
            self.line("I", text)

    def requested(self, text: str) -> None:
        """A line that a flag such as --dumpProfile asks for; printed with --quiet too."""
        self.line("I", text)

    def info(self, text: str) -> None:
        """A line of trtexec's log that the default output leaves out."""
        if self.verbose:
            self.line("I", text)

    def warn(self, text: str) -> None:
        self.facts.setdefault("warnings", []).append(text)
        self.line("W", text)

    def error(self, text: str) -> None:
        self.line("E", text)

    def detail(self, text: str) -> None:
        if self.verbose:
            self.line("V", text)

    def section(self, title: str, rows: dict[str, object]) -> None:
        self.info(f"=== {title} ===")
        for k, v in rows.items():
            self.info(f"{k}: {v}")


def print_summary(log: Log, m: Measured, *, batch: int, percentiles: list[float], avg_runs: int, device: str) -> dict[str, float]:
    """Prints trace averages and the performance summary; returns throughput and median times by name. `device`: "GPU", or "" for a CPU: its
    lines say "latency" and "Compute Time"."""
    log.info(f"Warmup completed {m.warmup_queries} queries over the warm-up")
    log.info(f"Timing trace has {len(m.traces)} queries over {m.wall:.4g} s")
    log.info("")
    log.info("=== Trace details ===")
    log.info(f"Trace averages of {avg_runs} runs:")
    groups = [m.traces[i : i + avg_runs] for i in range(0, len(m.traces) - avg_runs + 1, avg_runs)]
    shown = groups if len(groups) <= 40 else [*groups[:20], *groups[-20:]]
    for g in shown:
        compute, latency, enqueue = (statistics.fmean(f(t) for t in g) for f in (_compute, _get_latency, _enqueue))
        log.info(
            f"Average on {avg_runs} runs - {f'{device} latency' if device else 'Latency'}: {compute:.6g} ms - Host latency: {latency:.6g} ms "
            f"(enqueue {enqueue:.6g} ms)"
        )
    queries = len(m.traces) / m.wall
    log.result("")
    log.result("=== Performance summary ===")
    log.result(f"Throughput: {queries:.6g} qps")
    log.result(f"Images: {queries * batch:.6g} images/s (batch {batch})")
    summary = {"qps": queries, "images_per_s": queries * batch}
    compute_title = f"{device} Compute Time".strip()
    parts = {"Latency": _get_latency, "Enqueue Time": _enqueue, "H2D Latency": _get_h2d, compute_title: _compute, "D2H Latency": _get_d2h}
    times: dict[str, dict[str, float]] = {}
    for title, f in parts.items():
        values = [f(t) for t in m.traces]
        tail = ", ".join(f"percentile({p:g}%) = {compute_percentile(values, p):.6g} ms" for p in percentiles)
        median = statistics.median(values)
        spread = f"min = {min(values):.6g} ms, max = {max(values):.6g} ms, mean = {statistics.fmean(values):.6g} ms"
        log.result(f"{title}: {spread}, median = {median:.6g} ms" + (f", {tail}" if tail else ""))
        summary[f"{title} median ms"] = median
        tails = {f"percentile_{p:g}": compute_percentile(values, p) for p in percentiles}
        times[title] = {"min": min(values), "max": max(values), "mean": statistics.fmean(values), "median": median, **tails}
    log.facts["performance"] = {"qps": queries, "images_per_s": queries * batch, "batch": batch, "queries": len(m.traces), "ms": times}
    total = statistics.fmean(_compute(t) for t in m.traces) * len(m.traces) / 1000
    log.result(f"Total Host Walltime: {m.wall:.6g} s")
    log.result(f"Total {compute_title}: {total:.6g} s")
    _warn_about_measurement(log, m, compute_title)
    log.info("Explanations of the performance metrics are printed in the verbose logs.")
    if device:
        log.detail(f"{compute_title} is the time of the engine's kernels.")
    else:
        log.detail("Compute Time is the time of the engine on the host's cores.")
    log.detail("Latency is H2D + compute + D2H. Throughput is queries (one batch each) divided by wall time; images/s is throughput times batch.")
    return summary


def _warn_about_measurement(log: Log, m: Measured, compute_title: str) -> None:
    compute = [_compute(t) for t in m.traces]
    median = statistics.median(compute)
    copy = statistics.median(_get_h2d(t) for t in m.traces)
    if copy >= median > 0:
        log.warn("Throughput may be bound by host-to-device copies: they take as long as the compute. --noDataTransfers excludes them.")
    if len(compute) > 1 and statistics.stdev(compute) > 0.025 * statistics.fmean(compute):
        share = statistics.stdev(compute) / statistics.fmean(compute)
        log.warn(f"{compute_title} is unstable, with coefficient of variance = {share:.3%}.")
        log.warn("  Lock the clocks, and stop other processes that use the device.")
    if m.streams > 1:
        log.warn(f"{m.streams} streams ran at once: latencies include waiting for each other.")


def _compute(t) -> float:
    return t.compute


def _get_latency(t) -> float:
    return t.latency


def _enqueue(t) -> float:
    return t.enqueue


def _get_h2d(t) -> float:
    return t.h2d


def _get_d2h(t) -> float:
    return t.d2h

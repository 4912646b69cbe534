"""The summary of `whet exec`: six lines about the engine and its times, above trtexec's wording."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from whet.cli._summary import Log
from whet.engine import EnginePlan, display_names
from whet.inspector.summary import describe_verification, shorten_name
from whet.measure.queries import Measured, compute_percentile
from whet.runtime import Engine
from whet.runtime.engine import Memory

_MIB = 2.0**20


def print_engine_summary(
    log: Log, engine: Engine, measured: Measured | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None, context: Any = None
) -> None:
    """Prints the summary, also with --quiet, and adds it to the facts of --json."""
    lines = format_summary(engine.plan, measured, shapes or {}, engine.memory(context))
    log.facts["summary"] = lines
    for text in lines:
        log.echo(text)


def format_summary(plan: EnginePlan, measured: Measured | None, shapes: Mapping[str, tuple[int, ...]], memory: Memory) -> list[str]:
    """Engine, latency, throughput, slowest layers, verification, memory with build time. Without `measured`: no latency and throughput."""
    machine = plan.machine.get("model") or plan.machine.get("name") or plan.backend
    threads = f", {plan.threads} thread{'s' * (plan.threads != 1)}" if plan.threads else ""
    about = f"{plan.network.name or 'network'} for {plan.backend} ({machine}){threads}"
    lines = [f"engine    {about}: {len(plan.network.layers)} layers in {_format_types(plan)}"]
    if measured is not None:
        ms = [t.latency for t in measured.traces]
        at = ", ".join(f"{name} {'x'.join(map(str, s)) or 'scalar'}" for name, s in shapes.items())
        lines.append(f"latency   median {statistics.median(ms):.4g} ms, p99 {compute_percentile(ms, 99):.4g} ms ({at}; {len(ms)} queries)")
        queries = len(ms) / measured.wall
        batch = next((s[0] for s in shapes.values() if s), 1)
        lines.append(f"rate      {queries:.4g} queries/s, {queries * batch:.4g} samples/s")
    return [*lines, f"slowest   {_format_slowest(plan)}", f"checked   {describe_verification(plan)}", f"memory    {_format_memory(plan, memory)}"]


def _format_types(plan: EnginePlan) -> str:
    """Element types with their numbers of layers: "int8 (20), float32 (3)", the most frequent first."""
    counts: dict[str, int] = {}
    for layer in plan.network.layers:
        kind = next((o[1] for o in (*plan.choices[layer.name].inputs, *plan.choices[layer.name].outputs) if o is not None), "-")
        counts[kind] = counts.get(kind, 0) + 1
    ordered = sorted(counts, key=lambda k: -counts[k])
    return ordered[0] if len(ordered) == 1 else ", ".join(f"{k} ({counts[k]})" for k in ordered)


def _format_slowest(plan: EnginePlan, shown: int = 3) -> str:
    times, names = plan.report.layer_ms, display_names(plan.network)
    total = sum(times.values())
    if not total:
        return "unknown, the build timed nothing; --dumpProfile measures the layers"
    top = sorted((n for n in times if n in names), key=lambda n: -times[n])[:shown]
    return ", ".join(f"{shorten_name(names[n], 28)} {100 * times[n] / total:.0f} %" for n in top)


def _format_memory(plan: EnginePlan, memory: Memory) -> str:
    built = f"; built in {plan.report.build_seconds:.3g} s" if plan.report.build_seconds else ""
    t = plan.report.timing
    cached = f" ({t.misses} measurements, {t.hits} from the timing cache)" if t is not None and t.hits + t.misses else ""
    return f"{(memory.packed or memory.weights) / _MIB:.3g} MiB weights, {(memory.arena + memory.scratch) / _MIB:.3g} MiB activations{built}{cached}"

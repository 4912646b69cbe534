"""`--splitFusions` of `whet exec`: below each fused layer, its operations as layers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.cli._console import Bar
from whet.cli._summary import Log
from whet.inspector.summary import shorten_name


def print_parts(log: Log, context: Any, records: list[dict[str, Any]], shapes: Mapping[str, tuple[int, ...]], timing_cache: str | None) -> None:
    """Prints each fused layer's time alone as the build measured it, those of its operations, and the difference; adds them to the facts.

    `records`: the rows of the profile in the order of the layers; their median replaces a time that the build did not measure.
    """
    from whet.builder.parts import time_parts
    from whet.inspector.facts import layer_facts

    plan = context.engine.plan.part(context.profile_index)[0]
    facts = layer_facts(plan, shapes)
    with Bar("timing the parts of fused layers") as bar:
        times = time_parts(plan, [f.layer for f in facts], timing_cache=timing_cache, progress=bar.update)
    log.requested("")
    log.requested("=== Fused layers and their operations alone ===")
    log.requested("   Fused(ms)    Alone(ms)   Saved(ms)   Layer and operations")
    rows: list[dict[str, Any]] = []
    for f, r in zip(facts, records, strict=True):
        parts = times.get(f.layer.name)
        if not parts:
            continue
        alone = None if any(p.ms is None for p in parts) else sum(p.ms or 0.0 for p in parts)
        own = f.chosen.ms if f.chosen is not None and f.chosen.ms is not None else r["medianMs"]
        saved = None if alone is None else alone - own
        log.requested(f"{own:12.4f} {_format_ms(alone)} {_format_ms(saved)}   {shorten_name(f.name, 60)}")
        for p in parts:
            log.requested(f"{'':12} {_format_ms(p.ms)} {'':12}     {p.op} {p.node}" + (f"  ({p.why})" if p.why else ""))
        rows.append({"name": f.name, "fusedMs": own, "aloneMs": alone, "savedMs": saved,
                     "parts": [{"op": p.op, "node": p.node, "ms": p.ms, "why": p.why} for p in parts]})  # fmt: skip
    log.facts["fusions"] = rows
    known = [float(x["savedMs"]) for x in rows if x["savedMs"] is not None]
    saved = sum(known)
    log.requested(f"Fusion saves {saved:.4f} ms in {len(known)} of {len(rows)} fused layers, reformats between operations not counted.")


def _format_ms(value: float | None) -> str:
    return f"{'-':>12}" if value is None else f"{value:12.4f}"

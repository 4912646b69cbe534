"""The decisions of a build: candidates with times, refusals with reasons, passes that did not fire with reasons."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from whet.composites import find_composite
from whet.engine import Candidate, EnginePlan
from whet.engine.report import SelectionRecord
from whet.engine.schema import encode
from whet.engine.time_check import find_contradiction
from whet.inspector.facts import LayerFacts, find_layer, layer_facts
from whet.inspector.sparse_layers import layer_sparsity
from whet.inspector.words import get_layer_type


def explain(plan: EnginePlan, layer: str | None = None) -> dict[str, Any]:
    """Data for `whet explain engine [layer]`.

    Without a layer: the engine, its slowest layers, passes, notes, engine candidates with times. With a layer (display name, layer name or
    source node): its tactic and formats, candidates, refusals, and the passes that matched it. Raises UsageError for an unknown layer.
    """
    facts = layer_facts(plan)
    if layer is None:
        return _describe_engine(plan, facts)
    return explain_layer(plan, find_layer(facts, layer))


def _describe_engine(plan: EnginePlan, facts: list[LayerFacts]) -> dict[str, Any]:
    passes = plan.report.passes
    fired: dict[str, int] = dict.fromkeys(passes.order, 0)
    for name, *_ in passes.fired:
        fired[name] = fired.get(name, 0) + 1
    total = sum(f.ms or 0.0 for f in facts)
    slowest = sorted(facts, key=lambda f: -(f.ms or 0.0))
    return {
        "network": plan.network.name,
        "backend": plan.backend,
        "threads": plan.threads,
        "machine": plan.machine,
        "layers": len(facts),
        "reformats": sum(f.layer.op == "Reformat" for f in facts),
        "latency_ms": plan.report.latency_ms,
        "sum_of_layers_ms": total or None,
        "verification": None if plan.report.verification is None else encode(plan.report.verification),
        "disturbed": find_contradiction(plan.report.layer_ms, plan.report.latency_ms),
        "flops": sum(f.flops for f in facts),
        "bytes": sum(f.bytes for f in facts),
        "arena_bytes": [a.total * max(a.concurrent_samples, 1) for a in plan.arenas],
        "lanes": [a.concurrent_samples for a in plan.arenas],
        "samples": {} if plan.report.samples is None else encode(plan.report.samples),
        "choice": {} if plan.report.choice is None else _describe_selection(plan.report.choice),
        "engines": encode(plan.report.engines),
        "slowest": [_summarize_layer(f, total) for f in slowest],
        "by_tactic": _group_by_tactic(facts, total),
        "passes_fired": fired,
        "passes_that_did_not_fire": [n for n, k in fired.items() if not k],
        "skips": [{"pass": p, "layer": x, "reason": why} for p, x, why in passes.skipped],
        "notes": list(plan.report.notes),
        "info": list(plan.report.info),
        "precisions": {name: asdict(use) for name, use in plan.report.precisions.items()},
        "banned": encode(plan.report.banned),
    }


def _describe_selection(record: SelectionRecord) -> dict[str, Any]:
    """The record, with the cost reached by each search method under the key `METHOD ms`."""
    data: dict[str, Any] = encode(record)
    return {k: v for k, v in data.items() if k != "tried_ms"} | {f"{method} ms": ms for method, ms in record.tried_ms.items()}


def _summarize_layer(f: LayerFacts, total: float) -> dict[str, Any]:
    return {
        "name": f.name,
        "layer": f.layer.name,
        "type": get_layer_type(f.layer, f.choice),
        "tactic": f.choice.tactic,
        "kernel": f.choice.implementation,
        "ms": f.ms,
        "percent": 100 * f.ms / total if f.ms is not None and total else None,
        "bound": f.bound,
    }


def _group_by_tactic(facts: list[LayerFacts], total: float) -> list[dict[str, Any]]:
    groups: dict[str, list[LayerFacts]] = {}
    for f in facts:
        groups.setdefault(f.choice.tactic, []).append(f)
    rows = []
    for tactic, members in groups.items():
        ms = sum(f.ms or 0.0 for f in members)
        rows.append({"tactic": tactic, "layers": len(members), "ms": ms or None, "percent": 100 * ms / total if total else None})
    return sorted(rows, key=lambda r: -(r["ms"] or 0.0))


def explain_layer(plan: EnginePlan, f: LayerFacts) -> dict[str, Any]:
    """Data of one layer: `explain(plan, layer)` for facts that are at hand."""
    passes = plan.report.passes
    names = {f.layer.name, *f.layer.sources, *(t.name for t in f.layer.outputs)}
    if f.layer.op == "Fused":
        names |= {x.name for x in f.layer.regions["body"].layers}
    timed = sorted((c for c in f.candidates if c.ms is not None), key=lambda c: c.ms or 0.0)
    runner = f.runner_up
    described = find_composite(f.layer)
    sparsity = layer_sparsity(f)
    return {
        **_summarize_layer(f, sum(plan.report.layer_ms.values())),
        "op": f.layer.op,
        "composite": f.layer.composite,
        "title": described.title if described is not None else None,
        "sources": list(f.layer.sources),
        "inputs": [_describe_operand(t, o) for t, o in zip(f.layer.inputs, f.choice.inputs, strict=True) if t is not None],
        "outputs": [_describe_operand(t, o) for t, o in zip(f.layer.outputs, f.choice.outputs, strict=True)],
        "config": dict(f.choice.config),
        "in_place": list(f.choice.inplace),
        "flops": f.flops,
        "bytes": f.bytes,
        "weight_bytes": f.weight_bytes,
        "chosen": _describe_candidate(f, f.chosen) if f.chosen else None,
        "runner_up": _describe_candidate(f, runner) if runner else None,
        "why": _explain_choice(f),
        "sparsity": None if sparsity is None else {**sparsity.to_json(), "Text": sparsity.sentence()},
        "candidates": [_describe_candidate(f, c) for c in timed],
        "refused": [asdict(c) for c in f.refused],
        "passes_fired": [{"pass": p, "layer": x, "what": what} for p, x, what in passes.fired if x in names],
        "skips": [{"pass": p, "layer": x, "reason": why} for p, x, why in passes.skipped if x in names],
    }


def _describe_candidate(f: LayerFacts, c: Candidate) -> dict[str, Any]:
    return {**asdict(c), "cold_ms": f.cold(c)}


def _describe_operand(t: Any, o: tuple[str, str] | None) -> dict[str, Any]:
    return {"name": t.name, "type": str(t.type), "stored": f"{o[1]}:{o[0]}" if o else "packed by the tactic", "constant": t.is_constant}


def _explain_choice(f: LayerFacts) -> str:
    """The reason for the choice, in one sentence."""
    chosen, runner = f.chosen, f.runner_up
    if not f.candidates:
        return "The engine keeps no candidates: it was locked, or built without timing."
    if chosen is None or chosen.ms is None:
        return f"Nothing was timed; {f.choice.tactic} is the first that takes the layer."
    own = _format_alone(chosen.ms, f.cold(chosen))
    if runner is None or runner.ms is None:
        return f"Only {f.choice.tactic} computes it in these formats: {own}."
    other = _format_alone(runner.ms, f.cold(runner))
    if runner.ms < chosen.ms:
        why = runner.reason or "its formats would cost more around it"
        if runner.tactic == "unfused":
            return f"{own}; compared with its unfused parts: {why}."
        return f"{own}; {runner.tactic} took {other}, but: {why}."
    more = (runner.ms / chosen.ms - 1) * 100 if chosen.ms else 0.0
    return f"{own}, the fastest; {runner.tactic} took {more:.0f} % more: {other}."


def _format_alone(ms: float, cold: float | None) -> str:
    return f"{ms:.4f} ms alone" + ("" if cold is None else f" ({cold:.4f} with weights out of the L2 cache)")

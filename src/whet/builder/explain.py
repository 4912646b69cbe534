"""The build report: the candidates of each layer with times or reasons, the selection, options, passes and phases."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import report_precisions
from whet.builder.progress import ProgressLog
from whet.builder.select.search import Search
from whet.builder.select.whole_engine import SelectedEngine
from whet.engine.plan import EnginePlan
from whet.engine.report import Banned, Candidate, PassFired, PassRecord, PassSkipped, Unfused
from whet.measure.option import Option
from whet.network import Layer, Network
from whet.passes import PassLog
from whet.runtime.kernels import make_signature

#: Options that control the search, not its result: the engine does not store them.
_SEARCH_ONLY = {
    *("timing_cache", "lock", "error_on_cache_miss", "retime", "avg_timing", "max_tactics", "whole_engines", "in_network"),
    *("verify", "verify_again"),
}


def record_selection(search: Search, selected: SelectedEngine) -> None:
    """Writes the selection into the report of the selected plan: engines compared, candidates and their times, unfused layers, bans."""
    report, candidate = selected.plan.report, selected.candidate
    report.choice, report.choice_core, report.engines = selected.make_selection_record(), list(candidate.assignment.core), selected.engines
    report.candidates = report_candidates(search, candidate.lowered, selected.chosen)
    report.cold_ms = report_cold_times(search, candidate.lowered, selected.chosen)
    report.timing = search.timing.report()
    report.unfused = [Unfused(*row) for row in (*search.listing.unfused, *candidate.unfused)]
    report.banned = [Banned(*row) for row in search.bans.listed]


def complete_report(plan: EnginePlan, passes: PassLog, config: BuildConfig, log: ProgressLog, started: float) -> None:
    """Sets the options of a plan and the parts of its report about the whole build. `started`: time.perf_counter() at its beginning."""
    plan.options = {k: v for k, v in dataclasses.asdict(config).items() if k not in _SEARCH_ONLY}
    signatures = {layer.name: (layer, make_signature(plan.choices[layer.name], layer)) for layer in plan.network.layers if layer.op != "Reformat"}
    report = plan.report
    report.precisions = report_precisions(config, signatures)
    for name, use in report.precisions.items():
        if use.reason:
            log.note(f"--{name} is permitted but used by 0 of {use.of} layers: {use.reason}")
    skipped = [PassSkipped(name, layer, reason) for (name, layer), reason in passes.skipped.items()]
    report.passes = PassRecord(list(passes.order), [PassFired(*f) for f in passes.fired], skipped)
    report.notes = list(log.notes)
    report.built = datetime.now(UTC).isoformat(timespec="seconds")
    report.build_seconds = time.perf_counter() - started
    report.phase_seconds = log.seconds()


def report_candidates(search: Search, net: Network, chosen: Mapping[str, Option]) -> dict[str, list[Candidate]]:
    """Per layer of `net` (without its reformats): the chosen candidate, then the others by time, untimed candidates and refusals."""
    report: dict[str, list[Candidate]] = {}
    for layer in net.layers:
        selected, *others = _sort_options(search, layer, chosen)
        reasons = [search.why_not_option(layer, o, net) or o.note or explain_rejection(o, selected) for o in others]
        rows = [selected.candidate(), *(o.candidate(reason) for o, reason in zip(others, reasons, strict=True))]
        unfused = search.unfused_times.get(search.kind_of[layer.name])
        if unfused is not None:
            rows.append(unfused.candidate())
        report[layer.name] = rows + list(search.refused(layer))
    for name, o in chosen.items():
        report.setdefault(name, [o.candidate()])
    return report


def report_cold_times(search: Search, net: Network, chosen: Mapping[str, Option]) -> dict[str, list[float | None]]:
    """Milliseconds with cold weights of each layer's candidates in the order of `report_candidates`, up to the last one that was timed so.
    Layers without such times are left out."""
    report = {}
    for layer in net.layers:
        row = [o.cold_ms for o in _sort_options(search, layer, chosen)]
        while row and row[-1] is None:
            row.pop()
        if row:
            report[layer.name] = row
    return report


def _sort_options(search: Search, layer: Layer, chosen: Mapping[str, Option]) -> list[Option]:
    """The chosen option of a layer, then the others by time, then those without a time."""
    selected = chosen[layer.name]
    others = [o for o in search.kinds[search.kind_of[layer.name]].options if o.ident != selected.ident]
    return [selected, *sorted(others, key=lambda o: (o.ms is None, o.ms or 0.0, o.rank))]


def explain_rejection(o: Option, selected: Option) -> str:
    """Why a timed option lost to the selected one."""
    if o.ms is None or selected.ms is None:
        return "listed after the chosen one, and nothing was timed"
    cold = "" if not o.cold_ms or not selected.cold_ms else f", {(o.cold_ms / selected.cold_ms - 1) * 100:+.0f} % with cold weights"
    if o.ms - selected.ms > max(o.spread_ms, selected.spread_ms):
        return f"{(o.ms / selected.ms - 1) * 100:.0f} % slower{cold}" if selected.ms else f"{(o.ms - selected.ms) * 1e3:.3g} us slower{cold}"
    if o.signature != selected.signature:
        return f"as fast or faster alone{cold}, but its formats would cost reformats around it"
    return f"not distinguishable from the chosen one by time{cold}"

"""build(): network -> engine. Each step is a file of this folder; this one says in which order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from whet.backends import Backend, get_backend
from whet.builder.assemble import assemble
from whet.builder.batching.per_profile import built_apart, fitting, tuned_apart
from whet.builder.batching.per_sample import WAYS, dealt_if_faster, verify_dealt, worth_dealing
from whet.builder.batching.profiles import resolve_profiles
from whet.builder.candidates.sparse_weights import with_sparsity
from whet.builder.candidates.tactic_sources import tactics_for
from whet.builder.config import BuildConfig
from whet.builder.explain import candidate_report, cold_report
from whet.builder.lock.lock import check_lock, locked_plan, read_lock
from whet.builder.lowering import blame_pass, lowered_network
from whet.builder.precision.permissions import Permissions, report_precisions
from whet.builder.progress import Noting, Progress
from whet.builder.select.fusion import list_fused_parts, time_unfused
from whet.builder.select.search import Search
from whet.builder.select.thread_count import fastest, thread_counts
from whet.builder.select.whole_engine import BrokenKernel, best_engine
from whet.builder.verify.verification import ban, ban_failures, ban_nearest, verification_inputs, verify_engine
from whet.engine.plan import EnginePlan, Profile
from whet.engine.probe import make_probe
from whet.engine.report import Banned, PassFired, PassRecord, PassSkipped, SelectionRecord, Unfused
from whet.errors import UsageError, VerificationError
from whet.network import Network
from whet.passes import PassLog
from whet.runtime.kernels import signature_of

#: options that say how to search, not what to build: they are no part of the engine
_SEARCH_ONLY = {"timing_cache", "lock", "error_on_cache_miss", "avg_timing", "max_tactics", "whole_engines", "in_network", "verify"}
_REBUILDS = 16  # kernels that may be banned before a build gives up
_SUMS = 8  # tactics of single layers that may be banned because the network is off though each layer is within its bound


def build(
    net: Network,
    config: BuildConfig | None = None,
    *,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    incumbent_ms: float | None = None,
) -> EnginePlan:
    """The engine for a `source` network. `inputs` are real data for verification (default: seeded normal numbers). `incumbent_ms` is what an
    engine takes that this one competes with: where it cannot win by far, less is tried to make it faster.

    Raises BuildError and its kinds: NoTacticError, MemoryLimitError, VerificationError, LockError; UsageError for options that
    do not fit the network; CacheError for an unusable timing cache.
    """
    config = config or BuildConfig()
    if not isinstance(net, Network) or not isinstance(config, BuildConfig):
        made = "build takes a Network and a BuildConfig: whet.build(whet.network_from_onnx('model.onnx'), whet.BuildConfig(...))"
        raise UsageError(f"{made}, not {type(net).__name__} and {type(config).__name__}")
    lock = read_lock(config.lock) if config.lock else None

    def make(config: BuildConfig, lock: dict[str, Any] | None, progress: Progress | None) -> EnginePlan:
        if lock is None and config.samples in WAYS:
            return apart(None, config, progress)
        counts = thread_counts(config, lock["threads"] if lock is not None else None)
        plans = [_built(net, dataclasses.replace(config, threads=n), lock, Noting(progress), inputs, incumbent_ms) for n in counts]
        plan = plans[0] if len(plans) == 1 else fastest(plans, config.seed)
        return apart(plan, config, progress) if lock is None and worth_dealing(net, config) else plan

    def apart(plan: EnginePlan | None, config: BuildConfig, progress: Progress | None) -> EnginePlan:
        tell = Noting(progress)
        return dealt_if_faster(plan, net, config, lambda c: _built(net, c, None, Noting(tell), None, None), tell, inputs)

    if not tuned_apart(config, lock):
        return make(config, lock, progress)
    resolve_profiles(net, config)  # what is wrong with a later one is said now
    return built_apart(config, lock, make, Noting(progress))


def _built(
    net: Network,
    config: BuildConfig,
    lock: dict[str, Any] | None,
    tell: Noting,
    inputs: Mapping[str, np.ndarray] | None,
    incumbent_ms: float | None,
) -> EnginePlan:
    """The engine for one number of threads."""
    started, inputs = time.perf_counter(), fitting(inputs, config)
    backend = get_backend(config.backend, threads=config.threads)
    if caution := backend.caution:
        tell.note(caution)
    permissions = Permissions.of(config)
    tactics = tactics_for(backend.name, config.tactic_sources)
    net, said = with_sparsity(net, config)
    for n in said:
        tell.note(n)
    if lock is not None:
        check_lock(lock, net, config, backend)
    tell.stage("passes", 1)
    lowered, log = lowered_network(net, config)
    tell.step("done")
    profiles, notes = resolve_profiles(lowered, config)
    for n in notes:
        tell.note(n)
    if lock is not None:
        plan = locked_plan(lock, net, lowered, profiles, backend, config)
        plan.report.choice, plan.report.unfused = SelectionRecord("lock"), [Unfused(n, "locked") for n in lock["unfused"]]
        if config.verify and backend.capabilities.executes:
            if plan.arenas[0].lanes:
                why = verify_dealt(plan, net, backend, config, inputs, tell)
            else:
                checked = verify_engine(plan, net, backend, inputs, config, tell)
                why = str(checked.failures[0]) if checked.failures else None
                plan.probe = make_probe(plan, checked.probe_outputs, seed=config.seed, rtol=checked.probe_rtol)
            if why is not None:
                raise VerificationError(f"the locked engine fails verification: {why}. Build without --lock.")
    else:
        search = Search(lowered, profiles, backend, tactics, permissions, config, tell, incumbent_ms)
        plan = _searched(search, net, profiles, backend, config, tell, inputs)
    _finish(plan, log, config, tell, started)
    return plan


def _searched(
    search: Search,
    net: Network,
    profiles: list[Profile],
    backend: Backend,
    config: BuildConfig,
    tell: Noting,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    """List, time, choose, verify; a kernel that fails is banned with its reason, and the rest is done again."""
    last, sums_banned = "", 0
    with search:
        for _ in range(_REBUILDS):
            search.listing.list_all(search.bans.reason)
            list_fused_parts(search)
            search.time_all()
            if not search.cannot_win(search.least_ms()):
                time_unfused(search)
            try:
                best = best_engine(search, lambda made, chosen: assemble(made, chosen, profiles, backend, config, net))
            except BrokenKernel as e:
                last = str(e)
                ban(search, e.layer, e.option, last, tell)
                continue
            report = best.plan.report
            report.choice, report.choice_core, report.engines = best.choice_report(), list(best.entry.choosing.core), best.engines
            report.candidates = candidate_report(search, best.entry.lowered, best.chosen)
            report.cold_ms = cold_report(search, best.entry.lowered, best.chosen)
            report.timing = search.timing.report()
            report.unfused = [Unfused(*entry) for entry in (*search.listing.unfused, *best.entry.unfused)]
            report.banned = [Banned(*entry) for entry in search.bans.listed]
            if not config.verify or not backend.capabilities.executes:
                return best.plan
            checked = verify_engine(best.plan, net, backend, inputs, config, tell)
            report.verification = checked.report()
            if not checked.failures:
                best.plan.probe = make_probe(best.plan, checked.probe_outputs, seed=config.seed, rtol=checked.probe_rtol)
                return best.plan
            if not any(f.layer for f in checked.failures):
                blamed = blame_pass(net, config, verification_inputs(best.plan, inputs, config), checked.network_bound)
                if not blamed and sums_banned < _SUMS and ban_nearest(search, checked, best, tell):
                    sums_banned += 1
                    continue
                kept = " The graph passes keep the network's result, so it is the sum of many roundings: the network is sensitive to them."
                raise VerificationError(f"{checked.failures[0]}{blamed or kept}")
            ban_failures(search, checked, best, tell)
            last = str(checked.failures[0])
    raise VerificationError(
        f"{_REBUILDS} kernels in a row failed verification, the last of them: {last}. This machine or a library on it "
        "computes wrongly; --passes=none and --builderOptimizationLevel=0 narrow it down."
    )


def _finish(plan: EnginePlan, log: PassLog, config: BuildConfig, tell: Noting, started: float) -> None:
    """Options, probe and report of a finished plan."""
    plan.options = {k: v for k, v in dataclasses.asdict(config).items() if k not in _SEARCH_ONLY}
    signatures = {layer.name: (layer, signature_of(plan.choices[layer.name], layer)) for layer in plan.network.layers if layer.op != "Reformat"}
    report = plan.report
    report.precisions = report_precisions(config, signatures)
    for name, use in report.precisions.items():
        if use.reason:
            tell.note(f"--{name} is permitted but used by 0 of {use.of} layers: {use.reason}")
    skipped = [PassSkipped(name, layer, reason) for (name, layer), reason in log.skipped.items()]
    report.passes = PassRecord(list(log.order), [PassFired(*f) for f in log.fired], skipped)
    report.notes = list(tell.notes)
    report.built = datetime.now(UTC).isoformat(timespec="seconds")
    report.build_seconds = time.perf_counter() - started
    report.phase_seconds = tell.seconds()

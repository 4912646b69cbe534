"""build(): network -> engine. `_build_engine` lists the stages in order; their code is in the packages of this folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder.batching.per_profile import build_profiles, has_profile_plans, select_inputs
from whet.builder.batching.per_sample import PER_SAMPLE_MODES, may_run_per_sample, select_sample_mode
from whet.builder.batching.profiles import describe_assumed_shapes, resolve_profiles
from whet.builder.candidates.enumerate import Candidates
from whet.builder.candidates.sparse_weights import apply_sparsity
from whet.builder.candidates.tactic_sources import find_missing_libraries, list_enabled_tactics
from whet.builder.config import BuildConfig
from whet.builder.explain import complete_report
from whet.builder.host_tail import describe_host_tail, split_host_tail
from whet.builder.lock.lock import check_lock, check_locked_tail, read_lock
from whet.builder.lock.rebuild import rebuild_locked
from whet.builder.lowering import describe_widening, lower_network
from whet.builder.precision.permissions import Permissions
from whet.builder.progress import Progress, ProgressLog
from whet.builder.select.search import Search
from whet.builder.select.thread_count import list_thread_counts, select_fastest_plan
from whet.builder.select.verified_search import search_verified_engine
from whet.engine.plan import EnginePlan
from whet.engine.text import check_text_limits
from whet.errors import BackendError, BuildError, EngineError, NetworkError, NoTacticError, UsageError
from whet.network import Network


def build(
    net: Network,
    config: BuildConfig | None = None,
    *,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
    incumbent_ms: float | None = None,
    listed: dict[str, Candidates] | None = None,
) -> EnginePlan:
    """The engine for a `source` network. `inputs` are real data for verification (default: seeded, normally distributed values).
    `incumbent_ms` is the time of an engine that this one competes with: if it cannot win by a wide margin, fewer alternatives are tried.
    `listed` has the candidates by kind of layer from builds that time nothing, for the same machine and config; this build adds its own.

    Raises BuildError and its kinds: NoTacticError, MemoryLimitError, VerificationError, LockError; UsageError for options that
    do not fit the network; CacheError for an unusable timing cache.
    """
    config = config or BuildConfig()
    if not isinstance(net, Network) or not isinstance(config, BuildConfig):
        expected = "build takes a Network and a BuildConfig: build(whet.network_from_onnx('model.onnx'), whet.BuildConfig(...))"
        raise UsageError(f"{expected}, not {type(net).__name__} and {type(config).__name__}; whet.build takes models")
    net, tail = split_host_tail(net)
    if config.lock:
        check_locked_tail(read_lock(config.lock), tail)
    try:
        plan = _build_split(net, config, progress, inputs, incumbent_ms, listed)
    except (BackendError, NetworkError, NoTacticError) as e:
        if hint := describe_assumed_shapes(net, config):
            e.args = (f"{e}\n{hint}",)
        raise
    if tail is not None:
        plan.tail = tail
        plan.report.notes.append(describe_host_tail(tail))
    return plan


def _build_split(
    net: Network, config: BuildConfig, progress: Progress | None, inputs: Mapping[str, np.ndarray] | None, incumbent_ms: float | None,
    listed: dict[str, Candidates] | None,
) -> EnginePlan:  # fmt: skip
    """The engine of a network without layers that run on the host, with all thread counts, sample modes and profiles of the config."""
    lock = read_lock(config.lock) if config.lock else None

    def build_plan(config: BuildConfig, lock: dict[str, Any] | None, progress: Progress | None) -> EnginePlan:
        """One plan: the fastest of several thread counts, then of several sample modes."""
        if lock is None and config.samples in PER_SAMPLE_MODES:
            return select_mode(None, config, progress)
        counts = list_thread_counts(config, lock["threads"] if lock is not None else None)
        configs = [dataclasses.replace(config, threads=n) for n in counts]
        plans = [_build_engine(net, c, lock, ProgressLog(progress), inputs, incumbent_ms, listed) for c in configs]
        plan = select_fastest_plan(plans, config)
        return select_mode(plan, config, progress) if lock is None and may_run_per_sample(net, config) else plan

    def select_mode(plan: EnginePlan | None, config: BuildConfig, progress: Progress | None) -> EnginePlan:
        log = ProgressLog(progress)
        return select_sample_mode(plan, net, config, lambda c: _build_engine(net, c, None, ProgressLog(log), None, None), log, inputs)

    if not has_profile_plans(config, lock):
        return build_plan(config, lock, progress)
    resolve_profiles(net, config)  # reports an error in a later profile before the first one is built
    return build_profiles(config, lock, build_plan, ProgressLog(progress))


def _build_engine(
    net: Network,
    config: BuildConfig,
    lock: dict[str, Any] | None,
    log: ProgressLog,
    inputs: Mapping[str, np.ndarray] | None,
    incumbent_ms: float | None,
    listed: dict[str, Candidates] | None = None,
) -> EnginePlan:
    """The engine for one thread count."""
    started = time.perf_counter()
    inputs = select_inputs(inputs, config)
    backend = get_backend(config.backend, threads=config.threads)
    log.note_all([backend.caution] if backend.caution else [])
    permissions = Permissions.of(config)
    tactics = list_enabled_tactics(backend.name, config.tactic_sources)
    log.note_all(find_missing_libraries(backend.name, config.tactic_sources))
    net, notes = apply_sparsity(net, config)
    log.note_all(notes)
    if lock is not None:
        check_lock(lock, net, config, backend)
    log.stage("passes", 1)
    lowered, passes = lower_network(net, config)
    try:
        check_text_limits(lowered)
    except EngineError as e:
        raise BuildError(f"no engine can hold this network: {e}") from e
    log.step("done")
    log.note_all([*describe_widening(passes, config), *passes.notes])
    log.note_all(text for key, text in net.metadata.items() if key.startswith("assumed."))
    profiles, notes = resolve_profiles(lowered, config)
    log.note_all(notes)
    if lock is not None:
        plan = rebuild_locked(lock, net, lowered, profiles, backend, config, inputs, log)
    else:
        search = Search(lowered, profiles, backend, tactics, permissions, config, log, incumbent_ms, listed)
        plan = search_verified_engine(search, net, profiles, inputs)
    complete_report(plan, passes, config, log, started)
    return plan

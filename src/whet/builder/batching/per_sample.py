"""Selecting the sample mode: engines that run a batch at once or per sample are built, timed interleaved, and the fastest is kept.

If the samples of a batch are independent, an engine of one sample can run the batch. Mode "parallel": each thread runs whole samples on an
engine planned for one thread. No thread waits for others after each layer, a sample's activations stay in the caches, and Concat layers may be views,
which a dynamic batch does not allow. Mode "sequential": all threads run one sample after the other. They synchronize after each layer, but weights
are read once for all threads, and the arena is that of one sample. The runtime is runtime/sample_parallel.py; gains are in docs/design/choice.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from whet.backends import Backend, get_backend, get_capabilities
from whet.builder.assemble import make_sample_parallel
from whet.builder.batching.per_sample_check import find_batch_difference
from whet.builder.batching.profiles import resolve_profiles
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.builder.select.plan_history import EARLIER, compare_plans, recall_plans
from whet.builder.verify.repeated import verify_once
from whet.engine.plan import EnginePlan, Profile
from whet.engine.probe import make_probe, probe_inputs, probe_shapes
from whet.engine.report import BuildReport, SampleModes
from whet.errors import BackendError, BuildError, EngineError
from whet.measure.compare import Ranking, compare, measure_run
from whet.measure.policy import SAMPLE_MODES
from whet.network import Network
from whet.ops import batch_symbol, why_samples_touch
from whet.runtime import SampleParallelEngine, bind, count_arena_bytes

Make = Callable[[BuildConfig], EnginePlan]
Feeds = Mapping[str, np.ndarray]

_LEVEL = 3  # the least builderOptimizationLevel that compares sample modes
_WHAT = "the sample mode"
PER_SAMPLE_MODES = {"parallel": "one sample", "sequential": "one sample on all threads"}  # mode: the workload of its engine
_REPORT_KEYS = {"together": "together", "parallel": "apart", "sequential": "turns"}  # mode: prefix of its fields in SampleModes
_PRECISION_OPTIONS = ("precisions", "precision_constraints", "layer_precisions", "layer_output_types")  # a build with INT8 may have changed them


def may_run_per_sample(net: Network, config: BuildConfig) -> bool:
    """True if a per-sample mode is requested, or \"auto\" should try one: a dynamic batch tuned for more than one sample, on a CPU."""
    if config.samples != "auto":
        return config.samples in PER_SAMPLE_MODES
    timed = config.optimization_level >= _LEVEL and config.whole_engines > 0 and config.max_tactics != 0
    if not get_capabilities(config.backend).workers or not timed or len(config.profiles) > 1 or batch_symbol(net) is None:
        return False
    return _get_batch_size(resolve_profiles(net, config)[0][0]) > 1


def select_sample_mode(
    together: EnginePlan | None, net: Network, config: BuildConfig, make: Make, log: ProgressLog, inputs: Feeds | None
) -> EnginePlan:  # fmt: skip
    """The fastest engine: `together`, or one of `net` that runs per sample. With `together` None a per-sample mode is requested.

    `make` builds the engines of one sample. Raises BuildError if the requested mode is impossible, and the errors of `make`.
    """
    backend = get_backend(config.backend, threads=max(config.threads, 0))
    profiles, _ = resolve_profiles(net, config)
    why = _explain_unsupported(net, profiles, config, backend)
    if why is None:
        modes = (config.samples,) if config.samples in PER_SAMPLE_MODES else tuple(PER_SAMPLE_MODES)[: 2 if backend.threads > 1 else 1]
        engines = [_build_mode(w, config, profiles, backend, together, make, log) for w in modes]
        compared = _ModeComparison(together, engines, backend, config)
        why = compared.why_not
    if why is None and config.verify and (why := verify_sample_parallel(compared.engine.plan, net, backend, config, inputs, log)) is not None:
        log.note(f"an engine that runs samples one by one was the fastest, but it fails verification: {why}")
    if why is None:
        return _report_mode(compared, config, log.seconds())
    if together is None:
        raise BuildError(f"samples cannot be run one by one: {why}. Build without --samples={config.samples}.")
    together.report.samples = SampleModes("together", why)
    return together


@dataclass(frozen=True)
class _ModeEngine:
    """An engine `one` of one sample, and the engine `plan` of batches made from it. `name`: the sample mode."""

    name: str
    one: EnginePlan
    plan: EnginePlan

    @property
    def description(self) -> str:
        workers = self.plan.arenas[0].concurrent_samples
        return f"in parallel on {workers} thread(s)" if self.name == "parallel" else f"one at a time on all {self.plan.threads} thread(s)"


def _build_mode(
    name: str, config: BuildConfig, profiles: Sequence[Profile], backend: Backend, together: EnginePlan | None, make: Make, log: ProgressLog
) -> _ModeEngine:  # fmt: skip
    one_thread = name == "parallel"
    with log.prefix_stages(PER_SAMPLE_MODES[name]):
        one = make(_make_one_sample_config(config, profiles[0], together, 1 if one_thread else backend.threads))
    backend.activate()
    return _ModeEngine(name, one, make_sample_parallel(one, profiles, backend, None if one_thread else 1))


class _ModeComparison:
    """Engines timed interleaved at the opt shapes. `engine` is the fastest per-sample engine, `ms` and `spread_ms` are its times, `rest` those of
    the other engines by mode. `why_not` is the reason why no per-sample engine is kept, or None."""

    def __init__(self, together: EnginePlan | None, engines: Sequence[_ModeEngine], backend: Backend, config: BuildConfig):
        self.together, self.batch = together, _get_batch_size(engines[0].plan.profiles[0])
        first = 0 if together is None else 1
        runnable, self.why_not = _filter_by_memory(engines, config)
        times = recall_plans(self._list_plans(runnable), _WHAT, config, backend) if runnable else None
        if times is None:
            runs = [] if together is None else [_bind(together, backend)]
            bound = []
            for w in runnable:
                try:
                    runs.append(_bind(w.plan, backend))
                    bound.append(w)
                except (EngineError, BackendError) as e:
                    self.why_not = str(e)
            if not bound:
                return
            runnable = bound
            order = [*range(first), *reversed(range(first, len(runs)))]  # ties: "sequential" before "parallel"; it uses less memory
            plans, measure = self._list_plans(runnable), partial(_compare, runs, engines[0].plan, backend, config)
            times = compare_plans(plans, order, _WHAT, config, backend, measure)
        self.why_not, self.recalled = None, times.recalled
        ms, spread_ms = ([1e3 * s for s in row] for row in (times.seconds, times.spreads))
        kept = times.selected if times.selected >= first else times.find_fastest(range(first, len(ms)))
        self.engine, self.ms, self.spread_ms = runnable[kept - first], ms[kept], spread_ms[kept]
        names = [*["together"][:first], *(w.name for w in runnable)]
        self.rest = {n: (ms[i], spread_ms[i]) for i, n in enumerate(names) if i != kept}
        if times.selected < first:
            each = " and ".join(f"{ms[first + i]:.4g} ms {w.description}" for i, w in enumerate(runnable))
            self.why_not = f"not faster: {self.batch} samples take {each}, {ms[0]:.4g} ms together"

    def _list_plans(self, engines: Sequence[_ModeEngine]) -> list[EnginePlan]:
        return [*([] if self.together is None else [self.together]), *(w.plan for w in engines)]


def _filter_by_memory(engines: Sequence[_ModeEngine], config: BuildConfig) -> tuple[list[_ModeEngine], str | None]:
    """The engines within the memory limit, and why the last one of the others is not."""
    refused = [_explain_memory_refusal(w.plan, config) for w in engines]
    return [w for w, why in zip(engines, refused, strict=True) if why is None], next((why for why in reversed(refused) if why is not None), None)


def _bind(plan: EnginePlan, backend: Backend) -> Any:
    """The engine bound to memory. Raises EngineError if it cannot run samples in parallel, BackendError if there is no memory."""
    own_backend = backend if plan.threads == backend.threads else get_backend(backend.name, threads=plan.threads)
    own_backend.activate()  # kernels are planned for the active thread count
    run: Any = bind(plan, own_backend)
    if isinstance(run, SampleParallelEngine) and run.why_not_parallel is not None:
        raise EngineError(run.why_not_parallel)
    return run


def without_sample_mode(config: BuildConfig) -> BuildConfig:
    """The config with samples="together", for engines that are compared before a sample mode is selected. A lock fixes the mode itself."""
    return config if config.lock else dataclasses.replace(config, samples="together")


def apply_sample_mode(plan: EnginePlan, net: Network, config: BuildConfig, make: Make, log: ProgressLog, inputs: Feeds | None) -> EnginePlan:
    """The engine of the fastest sample mode; `plan` was built for `net` with the config of `without_sample_mode`."""
    selected = plan if config.lock or not may_run_per_sample(net, config) else select_sample_mode(plan, net, config, make, log, inputs)
    selected.options = selected.options | {"samples": config.samples}
    return selected


def _get_batch_size(profile: Profile, which: int = 1) -> int:
    return min((shapes[which][0] for shapes in profile.shapes.values() if shapes[which]), default=0)


def _explain_unsupported(net: Network, profiles: Sequence[Profile], config: BuildConfig, backend: Backend) -> str | None:
    if not backend.capabilities.executes or not backend.capabilities.workers:
        return f"the backend '{config.backend}' has no CPU workers"
    if _get_batch_size(profiles[0], 0) < 1:
        return "the profile takes empty batches"
    return why_samples_touch(net, {n: s[2] for n, s in profiles[0].shapes.items()})


def _make_one_sample_config(config: BuildConfig, profile: Profile, together: EnginePlan | None, threads: int) -> BuildConfig:
    """The config of an engine of one sample. It is not verified: only the engine that is kept is."""
    shapes = profile.of_one_sample().shapes
    low, opt, high = ({n: s[k] for n, s in shapes.items()} for k in range(3))
    precisions = {} if together is None else {k: together.options[k] for k in _PRECISION_OPTIONS}
    return dataclasses.replace(config, **precisions, threads=threads, profiles=((low, opt, high),), samples="together", verify=False, lock=None)


def _compare(runs: Sequence[Any], plan: EnginePlan, backend: Backend, config: BuildConfig) -> Ranking:
    """Times all engines at the opt shapes of `plan`."""
    inputs = probe_inputs(plan.network, config.seed, probe_shapes(plan))
    for run in runs:
        run.feed(inputs)
        run.seconds(1)
    ranking = compare([partial(measure_run, r) for r in runs], SAMPLE_MODES, watch=backend.watch)
    backend.activate()
    return ranking


def _explain_memory_refusal(plan: EnginePlan, config: BuildConfig) -> str | None:
    limit, needed = config.memory_limit.get("arena"), count_arena_bytes(plan)
    if limit is None or needed <= limit:
        return None
    return f"the arenas of all workers take {needed / 2**20:.2f} MiB, --memPoolSize=arena allows {limit / 2**20:.2f}"


def verify_sample_parallel(
    plan: EnginePlan, net: Network, backend: Backend, config: BuildConfig, inputs: Feeds | None, log: ProgressLog
) -> str | None:  # fmt: skip
    """The reason why a per-sample engine fails verification; if there is none, sets its probe and returns None.

    The engine of one sample is verified like any engine, and batches must give the results of their samples alone."""
    one, workers = plan.of_one_sample(), plan.arenas[0].concurrent_samples
    first = None if inputs is None else {n: np.asarray(a)[:1] for n, a in inputs.items()}
    verified = verify_once(one, net, backend if workers == 1 else get_backend(backend.name, threads=1), first, config, log)
    backend.activate()
    failures = verified.report.failures
    why = str(failures[0]) if failures else find_batch_difference(plan, backend, config.seed)
    if why is None:
        assert verified.probe is not None  # it passed
        run = bind(plan, backend)
        run.feed(probe_inputs(plan.network, config.seed, probe_shapes(plan)))
        run.run()
        plan.probe = make_probe(plan, run.fetch(), seed=config.seed, rtol=verified.probe["rtol"])
        plan.report = dataclasses.replace(plan.report, verification=verified.report)
    return why


def _report_mode(compared: _ModeComparison, config: BuildConfig, phases: Mapping[str, float]) -> EnginePlan:
    """The selected per-sample engine with a report of the comparison. Its layers' times are those of one sample."""
    engine, plan, together = compared.engine, compared.engine.plan, compared.together
    before, own = BuildReport() if together is None else together.report, engine.one.report
    description = f"samples run {engine.description}: {compared.batch} samples take {compared.ms:.4g} ms"
    words = {"together": "together", "parallel": "in parallel", "sequential": "one at a time"}
    description += ", " + ", ".join(f"{words[n]} {ms:.4g} ms" for n, (ms, _) in compared.rest.items()) if compared.rest else " (requested)"
    description += EARLIER if compared.recalled else ""
    times = {f"{_REPORT_KEYS[engine.name]}_ms": compared.ms}
    for name, (ms, spread_ms) in compared.rest.items():
        times |= {f"{_REPORT_KEYS[name]}_ms": ms, f"{_REPORT_KEYS[name]}_spread_ms": spread_ms}
    samples = SampleModes(engine.name, description, compared.batch, plan.arenas[0].concurrent_samples, compared.spread_ms, **times)
    seconds = dict(before.phase_seconds)
    for phase, s in phases.items():
        seconds[phase] = seconds.get(phase, 0.0) + s
    plan.report = dataclasses.replace(
        plan.report,
        quantized=before.quantized or plan.report.quantized,
        asked=before.asked or plan.report.asked,
        precision_choice=before.precision_choice or plan.report.precision_choice,
        accuracy=before.accuracy or plan.report.accuracy,
        threads=before.threads or plan.report.threads,
        notes=list(dict.fromkeys([*before.notes, *own.notes])),
        info=list(dict.fromkeys([*before.info, *own.info, description])),
        phase_seconds=seconds,
        build_seconds=sum(seconds.values()),
        samples=samples,
        latency_ms=compared.ms,
    )
    plan.options = engine.one.options | {"threads": config.threads, "profiles": config.profiles, "samples": config.samples}
    return plan

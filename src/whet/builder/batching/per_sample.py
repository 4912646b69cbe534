"""A batch as one, or sample by sample? All engines are built and timed in turns, and the fastest is kept.

Where samples do not touch, an engine that was planned for one of them on one thread can run a batch: every thread takes whole samples. No
thread waits for the others after each layer, one sample's numbers stay in the caches, and joins of one image lie in place, which those of a
changing batch cannot. Or all threads share one sample after the other: they wait for each other, but weights are read once for all of them,
and the memory is that of one. What both run by is runtime/sample_parallel.py; how much they bring, docs/design/choice.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from whet.backends import Backend, capabilities_of, get_backend
from whet.builder.assemble import dealt
from whet.builder.batching.per_sample_check import batch_differs
from whet.builder.batching.profiles import resolve_profiles
from whet.builder.config import BuildConfig
from whet.builder.progress import Noting
from whet.builder.verify.verification import verify_engine
from whet.engine.plan import EnginePlan, Profile
from whet.engine.probe import make_probe, probe_inputs, probe_shapes
from whet.engine.report import BuildReport, SampleModes
from whet.errors import BackendError, BuildError, EngineError
from whet.measure.compare import Ranking, compare
from whet.measure.policy import SAMPLE_MODES
from whet.network import Network
from whet.ops import batch_symbol, why_samples_touch
from whet.runtime import SampleParallelEngine, arena_bytes, bind

Make = Callable[[BuildConfig], EnginePlan]
Feeds = Mapping[str, np.ndarray]

_LEVEL = 3  # from here on whole engines are compared so
WAYS = {"apart": "one sample", "turns": "one sample on all threads"}  # to run samples one by one, and what their engine is of
_FOUND = ("precisions", "precision_constraints", "layer_precisions", "layer_output_types")  # what a build with INT8 may have settled


def worth_dealing(net: Network, config: BuildConfig) -> bool:
    """Whether running samples one by one comes into question: asked for, or a batch that changes and is tuned for more than one, on CPUs."""
    if config.samples != "auto":
        return config.samples in WAYS
    timed = config.optimization_level >= _LEVEL and config.whole_engines > 0 and config.max_tactics != 0
    if not capabilities_of(config.backend).workers or not timed or len(config.profiles) > 1 or batch_symbol(net) is None:
        return False
    return _batch(resolve_profiles(net, config)[0][0]) > 1


def dealt_if_faster(together: EnginePlan | None, net: Network, config: BuildConfig, make: Make, tell: Noting, inputs: Feeds | None) -> EnginePlan:
    """The engine that `together` is, or one of `net` that runs samples one by one where that is faster (or asked for, then `together` is None).

    `make` builds the engines of one sample. Raises BuildError where it is asked for and cannot be, and what `make` raises.
    """
    backend = get_backend(config.backend, threads=max(config.threads, 0))
    profiles, _ = resolve_profiles(net, config)
    why = _why_not(net, profiles, config, backend)
    if why is None:
        asked = (config.samples,) if config.samples in WAYS else tuple(WAYS)[: 2 if backend.threads > 1 else 1]
        ways = [_way(w, config, profiles, backend, together, make, tell) for w in asked]
        found = _Race(together, ways, backend, config)
        why = found.why_not
    if why is None and config.verify and (why := verify_dealt(found.way.plan, net, backend, config, inputs, tell)) is not None:
        tell.note(f"an engine that runs samples one by one was the fastest, but it fails verification: {why}")
    if why is None:
        return _told(found, config, tell.seconds())
    if together is None:
        raise BuildError(f"samples cannot be run one by one: {why}. Build without --samples={config.samples}.")
    together.report.samples = SampleModes("together", why)
    return together


@dataclass(frozen=True)
class _Way:
    """An engine of one sample, and that of batches which it becomes."""

    name: str
    one: EnginePlan
    plan: EnginePlan

    @property
    def said(self) -> str:
        lanes = self.plan.arenas[0].lanes
        return f"one by one on {lanes} thread(s)" if self.name == "apart" else f"in turns on {self.plan.threads} thread(s)"


def _way(
    name: str, config: BuildConfig, profiles: Sequence[Profile], backend: Backend, together: EnginePlan | None, make: Make, tell: Noting
) -> _Way:  # fmt: skip
    alone = name == "apart"
    with tell.making(WAYS[name]):
        one = make(_of_one_sample(config, profiles[0], together, 1 if alone else backend.threads))
    backend.activate()
    return _Way(name, one, dealt(one, profiles, backend, None if alone else 1))


class _Race:
    """The engines in turns at the opt shapes. `way` is the fastest of those that run samples one by one, `ms` and `spread_ms` its times, `rest`
    those of the others by name; `why_not` says why none of them is kept, or is None."""

    def __init__(self, together: EnginePlan | None, ways: Sequence[_Way], backend: Backend, config: BuildConfig):
        self.together, self.batch = together, _batch(ways[0].plan.profiles[0])
        able, runs, self.why_not = [], [] if together is None else [_bound(together, backend)], None
        first = len(runs)
        for w in ways:
            try:
                if (too_large := _too_large(w.plan, config)) is not None:
                    raise EngineError(too_large)
                runs.append(_bound(w.plan, backend))
                able.append(w)
            except (EngineError, BackendError) as e:
                self.why_not = str(e)
        if not able:
            return
        order = [*range(first), *reversed(range(first, len(runs)))]  # in turns before apart: all threads work whatever the batch, in less memory
        ranking, self.why_not = _compare(runs, ways[0].plan, backend, config), None
        ms, spread_ms = ([1e3 * s(i) for i in range(len(runs))] for s in (ranking.seconds, ranking.spread))
        selected = ranking.select(order)
        kept = selected if selected >= first else ranking.fastest(range(first, len(runs)))
        self.way, self.ms, self.spread_ms = able[kept - first], ms[kept], spread_ms[kept]
        names = [*["together"][:first], *(w.name for w in able)]
        self.rest = {n: (ms[i], spread_ms[i]) for i, n in enumerate(names) if i != kept}
        if selected < first:
            each = " and ".join(f"{ms[first + i]:.4g} ms {w.said}" for i, w in enumerate(able))
            self.why_not = f"not faster: {self.batch} samples take {each}, {ms[0]:.4g} ms together"


def _bound(plan: EnginePlan, backend: Backend) -> Any:
    """The engine over memory. Raises EngineError where its batch cannot be dealt, BackendError where there is no memory."""
    here = backend if plan.threads == backend.threads else get_backend(backend.name, threads=plan.threads)
    here.activate()  # kernels are planned for the calling thread's count
    run: Any = bind(plan, here)
    if isinstance(run, SampleParallelEngine) and run.why_not_parallel is not None:
        raise EngineError(run.why_not_parallel)
    return run


def as_one(config: BuildConfig) -> BuildConfig:
    """The same build of batches that are run as one: of engines that compete before samples are taken apart. A lock says it by itself."""
    return config if config.lock else dataclasses.replace(config, samples="together")


def dealt_at_last(plan: EnginePlan, net: Network, config: BuildConfig, make: Make, tell: Noting, inputs: Feeds | None) -> EnginePlan:
    """The engine that was kept of several (built `as_one` for `net`), or one that runs its samples apart where that is faster."""
    found = plan if config.lock or not worth_dealing(net, config) else dealt_if_faster(plan, net, config, make, tell, inputs)
    found.options = found.options | {"samples": config.samples}
    return found


def _batch(profile: Profile, which: int = 1) -> int:
    return min((shapes[which][0] for shapes in profile.shapes.values() if shapes[which]), default=0)


def _why_not(net: Network, profiles: Sequence[Profile], config: BuildConfig, backend: Backend) -> str | None:
    if not backend.capabilities.executes or not backend.capabilities.workers:
        return f"the backend '{config.backend}' has no lanes"
    if _batch(profiles[0], 0) < 1:
        return "the profile takes empty batches"
    return why_samples_touch(net, {n: s[2] for n, s in profiles[0].shapes.items()})


def _of_one_sample(config: BuildConfig, profile: Profile, together: EnginePlan | None, threads: int) -> BuildConfig:
    """The build of one sample on so many threads; verified when it is known to be the fastest."""
    shapes = profile.of_one_sample().shapes
    low, opt, high = ({n: s[k] for n, s in shapes.items()} for k in range(3))
    found = {} if together is None else {k: together.options[k] for k in _FOUND}
    return dataclasses.replace(config, **found, threads=threads, profiles=((low, opt, high),), samples="together", verify=False, lock=None)


def _compare(runs: Sequence[Any], plan: EnginePlan, backend: Backend, config: BuildConfig) -> Ranking:
    """Times all engines at the opt shapes of `plan`."""
    inputs = probe_inputs(plan.network, config.seed, probe_shapes(plan))
    for run in runs:
        run.feed(inputs)
        run.seconds(1)
    ranking = compare([partial(_once, r) for r in runs], SAMPLE_MODES, watch=backend.watch)
    backend.activate()
    return ranking


def _once(run: Any) -> float:
    return float(run.seconds(1)[0])


def _too_large(apart: EnginePlan, config: BuildConfig) -> str | None:
    limit, needed = config.memory_limit.get("arena"), arena_bytes(apart)
    if limit is None or needed <= limit:
        return None
    return f"arenas of all lanes take {needed / 2**20:.2f} MiB, --memPoolSize=arena allows {limit / 2**20:.2f}"


def verify_dealt(apart: EnginePlan, net: Network, backend: Backend, config: BuildConfig, inputs: Feeds | None, tell: Noting) -> str | None:
    """Why the engine is not right, or None (then it has its probe): one sample is verified as any engine is, and batches must give what their
    samples give alone."""
    one, lanes = apart.of_one_sample(), apart.arenas[0].lanes
    first = None if inputs is None else {n: np.asarray(a)[:1] for n, a in inputs.items()}
    checked = verify_engine(one, net, backend if lanes == 1 else get_backend(backend.name, threads=1), first, config, tell)
    backend.activate()
    why = str(checked.failures[0]) if checked.failures else batch_differs(apart, backend, config.seed)
    if why is None:
        run = bind(apart, backend)
        run.feed(probe_inputs(apart.network, config.seed, probe_shapes(apart)))
        run.run()
        apart.probe = make_probe(apart, run.fetch(), seed=config.seed, rtol=checked.probe_rtol)
        apart.report = dataclasses.replace(apart.report, verification=checked.report())
    return why


def _told(found: _Race, config: BuildConfig, phases: Mapping[str, float]) -> EnginePlan:
    """The engine with a report of what was compared: times of layers are those of one sample, on one thread or in turns on all."""
    way, plan, together = found.way, found.way.plan, found.together
    before, own = BuildReport() if together is None else together.report, way.one.report
    said = f"samples are run {'apart' if way.name == 'apart' else 'in turns'}: {found.batch} of them, {way.said}, take {found.ms:.4g} ms"
    words = {"together": "together", "apart": "on a thread each", "turns": "in turns"}
    said += ", " + ", ".join(f"{words[n]} {ms:.4g} ms" for n, (ms, _) in found.rest.items()) if found.rest else " (asked for)"
    times = {f"{way.name}_ms": found.ms}
    for name, (ms, spread_ms) in found.rest.items():
        times |= {f"{name}_ms": ms, f"{name}_spread_ms": spread_ms}
    samples = SampleModes(way.name, said, found.batch, plan.arenas[0].lanes, found.spread_ms, **times)
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
        info=list(dict.fromkeys([*before.info, *own.info, said])),
        phase_seconds=seconds,
        build_seconds=sum(seconds.values()),
        samples=samples,
        latency_ms=found.ms,
    )
    plan.options = way.one.options | {"threads": config.threads, "profiles": config.profiles, "samples": config.samples}
    return plan

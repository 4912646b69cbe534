"""A batch as one, or sample by sample? Both engines are built and timed in turns, and the faster is kept.

Where samples do not touch, an engine that was planned for one of them on one thread can run a batch: every thread takes whole samples. No
thread waits for the others after each layer, one sample's numbers stay in the caches, and joins of one image lie in place, which those of a
changing batch cannot. What it runs by is runtime/dealing.py; how much it brings, docs/design/choice.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder.assemble import dealt
from whet.builder.config import BuildConfig
from whet.builder.dealt import batch_differs
from whet.builder.payoff import Standing, standing
from whet.builder.profiles import resolve_profiles
from whet.builder.progress import Noting
from whet.builder.racing import race
from whet.builder.verification import verify_engine
from whet.engine.plan import EnginePlan, Profile
from whet.engine.probe import make_probe, probe_inputs, probe_shapes
from whet.errors import BackendError, BuildError, EngineError
from whet.network import Network
from whet.ops import batch_symbol, why_samples_touch
from whet.runtime import Deal, bind, dealt_bytes

Make = Callable[[BuildConfig], EnginePlan]
Feeds = Mapping[str, np.ndarray]

_LEVEL = 3  # from here on whole engines are compared so
_SECONDS, _TURNS = 1.5, 30  # spent on timing each of the two; turns, at most
_FOUND = ("precisions", "precision_constraints", "layer_precisions", "layer_output_types")  # what a build with INT8 may have settled


def worth_dealing(net: Network, config: BuildConfig) -> bool:
    """Whether running samples apart comes into question: asked for, or a batch that changes and is tuned for more than one, on CPUs."""
    if config.samples != "auto":
        return config.samples == "apart"
    timed = config.optimization_level >= _LEVEL and config.whole_engines > 0 and config.max_tactics != 0
    if config.backend != "cpu" or not timed or len(config.profiles) > 1 or batch_symbol(net) is None:
        return False
    return _batch(resolve_profiles(net, config)[0][0]) > 1


def dealt_if_faster(together: EnginePlan | None, net: Network, config: BuildConfig, make: Make, tell: Noting, inputs: Feeds | None) -> EnginePlan:
    """The engine that `together` is, or one of `net` that runs samples apart where that is faster (or asked for, then `together` is None).

    `make` builds the engine of one sample. Raises BuildError where it is asked for and cannot be, and what `make` raises.
    """
    machine = get_backend(config.backend, threads=max(config.threads, 0))
    profiles, _ = resolve_profiles(net, config)
    why = _why_not(net, profiles, config, machine)
    if why is None:
        with tell.making("one sample"):
            one = make(_of_one_sample(config, profiles[0], together))
        machine.activate()
        apart = dealt(one, profiles, machine)
        try:
            found = _timed(together, apart, machine, config)
        except (EngineError, BackendError) as e:
            why = str(e)
        else:
            why = _too_large(apart, config) or (_slower(found, apart) if together is not None else None)
    if why is None and config.verify and (why := verify_dealt(apart, net, machine, config, inputs, tell)) is not None:
        tell.note(f"an engine that runs samples apart was the fastest, but it fails verification: {why}")
    if why is None:
        return _told(apart, one, together, found, config, tell.seconds())
    if together is None:
        raise BuildError(f"samples cannot be run apart: {why}. Build without --samples=apart.")
    together.report["samples"] = {"kept": "together", "why": why}
    return together


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


def _why_not(net: Network, profiles: Sequence[Profile], config: BuildConfig, machine: Any) -> str | None:
    if not getattr(machine, "runs", True) or not hasattr(machine, "lanes"):
        return f"the backend '{config.backend}' has no lanes"
    if _batch(profiles[0], 0) < 1:
        return "the profile takes empty batches"
    return why_samples_touch(net, {n: s[2] for n, s in profiles[0].shapes.items()})


def _of_one_sample(config: BuildConfig, profile: Profile, together: EnginePlan | None) -> BuildConfig:
    """The build of one sample on one thread; verified when it is known to be the faster."""
    shapes = profile.of_one_sample().shapes
    low, opt, high = ({n: s[k] for n, s in shapes.items()} for k in range(3))
    found = {} if together is None else {k: together.options[k] for k in _FOUND}
    return dataclasses.replace(config, **found, threads=1, profiles=((low, opt, high),), samples="together", verify=False, lock=None)


def _timed(together: EnginePlan | None, apart: EnginePlan, machine: Any, config: BuildConfig) -> Standing:
    """Both in turns at the opt shapes; of equal ones the first is kept. Raises EngineError where the batch cannot be dealt."""
    inputs = probe_inputs(apart.network, config.seed, probe_shapes(apart))
    runs = []
    for plan in [p for p in (together, apart) if p is not None]:
        here = machine if plan.threads == machine.threads else get_backend(machine.name, threads=plan.threads)
        run: Any = bind(plan, here)
        if isinstance(run, Deal) and run.why_no_lanes is not None:
            raise EngineError(run.why_no_lanes)
        run.feed(inputs)
        run.seconds(1)
        runs.append(run)
    with machine.watch() if hasattr(machine, "watch") else nullcontext():
        times = race([partial(_once, r) for r in runs], _SECONDS, _TURNS)
    machine.activate()
    return standing(times, range(len(runs)))


def _once(run: Any) -> float:
    return float(run.seconds(1)[0])


def _slower(found: Standing, apart: EnginePlan) -> str | None:
    if found.kept == 1:
        return None
    batch, lanes = _batch(apart.profiles[0]), apart.arenas[0].lanes
    return f"not faster: {batch} samples take {found.ms[1]:.4g} ms one by one on {lanes} thread(s), {found.ms[0]:.4g} ms together"


def _too_large(apart: EnginePlan, config: BuildConfig) -> str | None:
    limit, needed = config.memory_limit.get("arena"), dealt_bytes(apart)
    if limit is None or needed <= limit:
        return None
    return f"arenas of all lanes take {needed / 2**20:.2f} MiB, --memPoolSize=arena allows {limit / 2**20:.2f}"


def verify_dealt(apart: EnginePlan, net: Network, machine: Any, config: BuildConfig, inputs: Feeds | None, tell: Noting) -> str | None:
    """Why the engine is not right, or None (then it has its probe): one sample is verified as any engine is, and batches must give what their
    samples give alone."""
    one = apart.of_one_sample()
    first = None if inputs is None else {n: np.asarray(a)[:1] for n, a in inputs.items()}
    checked = verify_engine(one, net, get_backend(machine.name, threads=1), first, config, tell)
    machine.activate()
    why = str(checked.failures[0]) if checked.failures else batch_differs(apart, machine, config.seed)
    if why is None:
        run = bind(apart, machine)
        run.feed(probe_inputs(apart.network, config.seed, probe_shapes(apart)))
        run.run()
        apart.probe = make_probe(apart, run.fetch(), seed=config.seed, rtol=checked.probe_rtol)
        apart.report = apart.report | {"verification": checked.report()}
    return why


def _told(
    apart: EnginePlan, one: EnginePlan, together: EnginePlan | None, found: Standing, config: BuildConfig, phases: Mapping[str, float]
) -> EnginePlan:
    """The engine with a report of what was compared: times of layers are those of one sample on one thread."""
    batch, lanes = _batch(apart.profiles[0]), apart.arenas[0].lanes
    before: dict[str, Any] = {} if together is None else together.report
    said = f"samples are run apart: {batch} of them, one by one on {lanes} thread(s), take {found.ms[-1]:.4g} ms"
    said += f", together {found.ms[0]:.4g} ms" if together is not None else " (asked for)"
    entry: dict[str, Any] = {"kept": "apart", "why": said, "batch": batch, "lanes": lanes, "apart_ms": found.ms[-1], "spread_ms": found.spread_ms[-1]}
    if together is not None:
        entry |= {"together_ms": found.ms[0], "together_spread_ms": found.spread_ms[0]}
    lists = {k: list(dict.fromkeys([*before.get(k, []), *one.report.get(k, [])])) for k in ("notes", "info")}
    lists["info"].append(said)
    kept = {k: before[k] for k in ("quantized", "asked", "precision_choice", "accuracy", "threads") if k in before}
    seconds = dict(before.get("phase_seconds", {}))
    for phase, s in phases.items():
        seconds[phase] = seconds.get(phase, 0.0) + s
    spent = {"phase_seconds": seconds, "build_seconds": sum(seconds.values())}
    apart.report = apart.report | kept | lists | spent | {"samples": entry, "latency_ms": found.ms[-1]}
    apart.options = one.options | {"threads": config.threads, "profiles": config.profiles, "samples": config.samples}
    return apart

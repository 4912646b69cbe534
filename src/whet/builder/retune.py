"""Retuning an engine on this machine: the same lowered network and options, new times and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from whet.backends import get_capabilities
from whet.builder.batching.per_profile import join_plans
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress
from whet.engine.json_data import Reader
from whet.engine.plan import EnginePlan, Profile
from whet.engine.schema import decode, encode
from whet.errors import EngineError, UsageError
from whet.network import Network
from whet.runtime.profiles import Shapes, find_nearest_profile

MOST_PROFILES = 4  # of a retune for recorded shapes
_NOT_STORED = frozenset({"backend", "threads", "profiles", "timing_cache", "error_on_cache_miss", "retime", "lock", "verify", "verify_again"})
#: largest values of stored options that multiply a retune's time; no build of a user needs more
_MOST = {"optimization_level": 5, "avg_timing": 1000, "max_tactics": 100_000, "whole_engines": 64, "seed": (1 << 32) - 1}


def remove_reformats(plan: EnginePlan) -> Network:
    """A copy of an engine's network without its reformats."""
    net = plan.network.clone("source")  # the passes run again, without effect
    for layer in [x for x in net.layers if x.op == "Reformat"]:
        net.replace(layer.outputs[0], layer.needs(0))
        net.remove(layer)
    net.prune_dead()
    net.sort()
    return net


def retune(
    plan: EnginePlan,
    *,
    threads: int = 0,
    timing_cache: str | None = None,
    progress: Progress | None = None,
    trace: Sequence[tuple[Shapes, int]] = (),
    most_profiles: int = MOST_PROFILES,
) -> EnginePlan:
    """An engine of the same network, passes and permissions, timed on this machine. `threads` 0: all usable ones.

    `trace` holds shapes of runs with their numbers (whet.runtime.read_trace): the engine then gets up to `most_profiles` profiles, tuned for the
    most frequent ones, and takes all shapes that it took before. Raises the errors of `build`, and EngineError for stored options that no build
    writes and for shapes that the engine does not take.
    """
    first, *rest = plan.by_profile() if not trace else split_by_trace(plan, trace, most_profiles)
    plans = [_retune_profile(first, threads, timing_cache, progress)]
    plans += [_retune_profile(p, plans[0].threads if get_capabilities(plan.backend).workers else threads, timing_cache, progress) for p in rest]
    retuned = join_plans(plans) if rest else plans[0]
    retuned.tail = plan.tail
    return retuned


def split_by_trace(plan: EnginePlan, trace: Sequence[tuple[Shapes, int]], most: int) -> list[EnginePlan]:
    """A plan for each profile to be tuned: one for each of the most frequent shapes, in the ranges of the profile that runs them now, and the
    profiles that ran none of them. Raises EngineError."""
    if not plan.profiles or all(t.type.static for t in plan.network.inputs):
        raise EngineError("the engine takes one set of shapes only: there is nothing to learn from the shapes of its runs. Retune it without them.")
    inputs = {t.name for t in plan.network.inputs}
    frequent: dict[tuple[Any, ...], tuple[int, int, Shapes]] = {}  # shapes -> profile, runs
    for shapes, runs in trace:
        number = find_nearest_profile(plan, shapes) if set(shapes) == inputs else None
        if number is None:
            said = ", ".join(f"{n}: {'x'.join(map(str, s))}" for n, s in shapes.items())
            raise EngineError(f"the engine does not take the recorded shapes {said}: they are of another engine, or of one with other profiles")
        key = tuple(sorted(shapes.items()))
        frequent[key] = (number, runs + frequent.get(key, (0, 0, shapes))[1], shapes)
    selected = sorted(frequent.values(), key=lambda row: -row[1])[:most]
    whole, plans = plan.by_profile(), []
    for k, profile in enumerate(plan.profiles):
        own = replace(whole[k if plan.others else 0], others=[])
        mine = [(runs, shapes) for p, runs, shapes in selected if p == k]
        for runs, shapes in mine:
            ranges = {n: (low, tuple(shapes[n]), high) for n, (low, _, high) in profile.shapes.items()}
            plans.append((runs, replace(own, profiles=[Profile(ranges)])))
        if not mine:
            plans.append((0, replace(own, profiles=[profile])))
    return [p for _, p in sorted(plans, key=lambda row: -row[0])]


def _retune_profile(plan: EnginePlan, threads: int, timing_cache: str | None, progress: Progress | None) -> EnginePlan:
    shapes = tuple(
        tuple({name: tuple(s[i]) for name, s in p.shapes.items()} for i in range(3))
        for p in plan.profiles
        if any(not t.type.static for t in plan.network.inputs)
    )
    given: dict[str, Any] = {"backend": plan.backend, "threads": threads, "timing_cache": timing_cache, "profiles": shapes, "verify": True}
    try:
        config = BuildConfig(**read_stored_options(plan), **given)
    except UsageError as e:
        raise EngineError(f"the engine's stored options are damaged: {e}") from e
    retuned = build(remove_reformats(plan), config, progress=progress)
    retuned.model_digest, retuned.source_weights, retuned.quantized_weights = plan.model_digest, plan.source_weights, plan.quantized_weights
    retuned.report.retuned_from = plan.machine_key
    return retuned


def read_stored_options(plan: EnginePlan) -> dict[str, Any]:
    """The options of an engine's build that a retune repeats, as fields of BuildConfig; each has its field's type and a bounded value.

    Options of the machine and of the run (backend, threads, profiles, files) are not among them, and neither is `verify`: a file cannot
    switch verification off. Raises EngineError naming the option.
    """
    hints = get_type_hints(BuildConfig)
    kept: dict[str, Any] = {}
    for name, value in plan.options.items():
        if name not in hints or name in _NOT_STORED:
            continue
        at = Reader(encode(value), name, Reader(None, "options"))
        kept[name] = decode(hints[name], at)
        if name in _MOST and not -1 <= kept[name] <= _MOST[name]:
            raise at.fail(f"a whole number up to {_MOST[name]}")
    return kept

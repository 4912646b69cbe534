"""Retuning an engine on this machine: the same lowered network and options, new times and choices."""

from __future__ import annotations

import dataclasses

from whet.backends import capabilities_of
from whet.builder.batching.per_profile import join_plans
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress
from whet.engine.plan import EnginePlan
from whet.network import Network


def remove_reformats(plan: EnginePlan) -> Network:
    """A copy of an engine's network without its reformats."""
    net = plan.network.clone("source")  # the passes run again, without effect
    for layer in [x for x in net.layers if x.op == "Reformat"]:
        net.replace(layer.outputs[0], layer.needs(0))
        net.remove(layer)
    net.prune_dead()
    net.sort()
    return net


def retune(plan: EnginePlan, *, threads: int = 0, timing_cache: str | None = None, progress: Progress | None = None) -> EnginePlan:
    """An engine of the same network, passes and permissions, timed on this machine. `threads` 0: all usable ones.

    Raises the errors of `build`.
    """
    first, *rest = plan.by_profile()
    plans = [_retune_profile(first, threads, timing_cache, progress)]
    plans += [_retune_profile(p, plans[0].threads if capabilities_of(plan.backend).workers else threads, timing_cache, progress) for p in rest]
    return join_plans(plans) if rest else plans[0]


def _retune_profile(plan: EnginePlan, threads: int, timing_cache: str | None, progress: Progress | None) -> EnginePlan:
    fields = {f.name for f in dataclasses.fields(BuildConfig)}
    kept = {k: _tuples(v) for k, v in plan.options.items() if k in fields}
    shapes = tuple(
        tuple({name: tuple(s[i]) for name, s in p.shapes.items()} for i in range(3))
        for p in plan.profiles
        if any(not t.type.static for t in plan.network.inputs)
    )
    config = BuildConfig(**{**kept, "threads": threads, "timing_cache": timing_cache, "profiles": shapes, "lock": None})
    retuned = build(remove_reformats(plan), config, progress=progress)
    retuned.model_digest, retuned.source_weights = plan.model_digest, plan.source_weights
    retuned.report.retuned_from = plan.machine_key
    return retuned


def _tuples(v):
    return tuple(_tuples(x) for x in v) if isinstance(v, list) else v

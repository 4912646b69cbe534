"""An engine tuned again on this machine: its own lowered network, its own options, new times and choices."""

from __future__ import annotations

import dataclasses

from whet.backends import capabilities_of
from whet.builder.batching.per_profile import joined
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress
from whet.engine.plan import EnginePlan
from whet.network import Network


def unformatted(plan: EnginePlan) -> Network:
    """A copy of an engine's network without the reformats that its old choice needed."""
    net = plan.network.clone("source")  # the passes run again, and find nothing left to do
    for layer in [x for x in net.layers if x.op == "Reformat"]:
        net.replace(layer.outputs[0], layer.needs(0))
        net.remove(layer)
    net.prune_dead()
    net.sort()
    return net


def retune(plan: EnginePlan, *, threads: int = 0, timing_cache: str | None = None, progress: Progress | None = None) -> EnginePlan:
    """The same network, passes and permissions, with everything timed here. `threads` 0 takes all usable ones.

    Raises what `build` raises.
    """
    first, *rest = plan.by_profile()
    made = [_retuned(first, threads, timing_cache, progress)]
    made += [_retuned(p, made[0].threads if capabilities_of(plan.backend).workers else threads, timing_cache, progress) for p in rest]
    return joined(made) if rest else made[0]


def _retuned(plan: EnginePlan, threads: int, timing_cache: str | None, progress: Progress | None) -> EnginePlan:
    fields = {f.name for f in dataclasses.fields(BuildConfig)}
    kept = {k: _tuples(v) for k, v in plan.options.items() if k in fields}
    shapes = tuple(
        tuple({name: tuple(s[i]) for name, s in p.shapes.items()} for i in range(3))
        for p in plan.profiles
        if any(not t.type.static for t in plan.network.inputs)
    )
    config = BuildConfig(**{**kept, "threads": threads, "timing_cache": timing_cache, "profiles": shapes, "lock": None})
    made = build(unformatted(plan), config, progress=progress)
    made.model_digest, made.source_weights = plan.model_digest, plan.source_weights
    made.report.retuned_from = plan.machine_key
    return made


def _tuples(v):
    return tuple(_tuples(x) for x in v) if isinstance(v, list) else v

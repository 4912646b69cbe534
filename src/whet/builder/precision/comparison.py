"""Does a precision pay? Whole engines timed in turns, and the layers whose quantized form took as long as the other one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from whet.backends import Backend
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import on_integers
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.measure.compare import race
from whet.network import Layer
from whet.runtime import Bound, WeightStore, bind

_SECONDS, _TURNS = 3.0, 40  # spent on timing each engine that is not clearly behind (engines that nearly tie need turns); turns, at most
_SAME, _NOISE = 0.003, 0.02  # of the fastest engine's time: what always counts as equal, and what at most does where times scatter
_MOVING = ("QuantizeLinear", "DequantizeLinear", "Reformat")


def slow_layers(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> frozenset[str]:
    """Names of the layers whose quantized form, with the Q, DQ and reformats around it, took as long as the floating-point one."""
    times = layer_times(floats, integers, layers)
    return frozenset(name for name, (before, after) in times.items() if before and after >= before)


def layer_times(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> dict[str, tuple[float, float]]:
    """(floating-point ms, quantized ms) of each layer that has one quantized form, with what moves numbers around it."""
    before, after = _times(floats), _times(integers)
    found = {}
    for layer in layers:
        own = known_as(layer)
        mine = [x for x in integers.network.layers if on_integers(x) and own & known_as(x)]
        theirs = [x for x in floats.network.layers if own & known_as(x)]
        if len(mine) != 1 or not theirs:
            continue
        cost = after.get(mine[0].name, 0.0) + _around(mine[0], integers, after)
        reference = sum(before.get(x.name, 0.0) + _around(x, floats, before, only="Reformat") for x in theirs)
        found[layer.name] = (reference, cost)
    return found


def _times(plan: EnginePlan) -> dict[str, float]:
    return dict(plan.report.layer_ms)


def _around(layer: Layer, plan: EnginePlan, times: Mapping[str, float], only: str = "") -> float:
    """Milliseconds of the moving layers and tables next to one: those that feed it, and those that read it, shared among their readers."""
    users = plan.network.users()
    kinds = (only,) if only else _MOVING
    cost = 0.0
    for t in layer.inputs:
        if t is not None and t.maker is not None and t.maker.op in kinds:
            cost += times.get(t.maker.name, 0.0) / max(len(users.get(t, [])), 1)
    for t in layer.outputs:
        cost += sum(times.get(r.name, 0.0) for r, _ in users.get(t, []) if r.op in kinds or (r.composite == "QuantizedTable" and not only))
    return cost


def known_as(layer: Layer) -> frozenset[str]:
    """What a layer is known by in both engines: its source nodes, or the parts of its name."""
    return frozenset(layer.sources) or frozenset(layer.name.split(" + "))


def in_turns(plans: list[EnginePlan], backend: Backend, config: BuildConfig) -> list[list[float]]:
    """Seconds of several engines, run in turns on the same inputs; those that are clearly behind have few."""
    inputs = probe_inputs(plans[0].network, config.seed, probe_shapes(plans[0]))
    store = WeightStore(backend)
    bounds = []
    for plan in plans:
        bound = bind(plan, backend, store=store)
        bound.feed(inputs)
        bound.seconds(1)
        bounds.append(bound)
    return race([partial(_once, b) for b in bounds], _SECONDS, _TURNS)


@dataclass(frozen=True)
class Standing:
    """Medians and quartile distances (ms) of engines that ran in turns, and which of them is kept."""

    ms: list[float]
    spread_ms: list[float]
    kept: int


def standing(times: Sequence[Sequence[float]], order: Sequence[int]) -> Standing:
    """Which engine to keep of `times` (seconds): the first in `order` that the noise cannot tell from the fastest of them."""
    middle = [median(t) * 1e3 for t in times]
    spread = [(float(np.quantile(t, 0.75)) - float(np.quantile(t, 0.25))) * 1e3 / 2 for t in times]
    fastest = min(sorted(order), key=lambda i: middle[i])
    best = middle[fastest]
    kept = next(i for i in order if middle[i] - best <= max(_SAME * best, min(spread[i], spread[fastest], _NOISE * best)))
    return Standing(middle, spread, kept)


def _once(bound: Bound) -> float:
    return bound.seconds(1)[0]

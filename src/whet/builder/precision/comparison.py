"""Comparing precisions: whole engines, and the layers that are not faster in quantized form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from whet.backends import Backend
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import on_integers
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.measure.compare import Ranking, compare
from whet.measure.policy import PRECISIONS
from whet.network import Layer
from whet.runtime import BoundEngine, WeightStore, bind

_MOVING = ("QuantizeLinear", "DequantizeLinear", "Reformat")


def slow_layers(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> frozenset[str]:
    """Names of the layers that are not faster in quantized form, including adjacent Q, DQ and reformat layers."""
    times = layer_times(floats, integers, layers)
    return frozenset(name for name, (before, after) in times.items() if before and after >= before)


def layer_times(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> dict[str, tuple[float, float]]:
    """(floating-point ms, quantized ms) of each layer with one quantized form, including adjacent Q, DQ and reformat layers."""
    before, after = _times(floats), _times(integers)
    times = {}
    for layer in layers:
        names = known_as(layer)
        quantized = [x for x in integers.network.layers if on_integers(x) and names & known_as(x)]
        originals = [x for x in floats.network.layers if names & known_as(x)]
        if len(quantized) != 1 or not originals:
            continue
        cost = after.get(quantized[0].name, 0.0) + _adjacent_ms(quantized[0], integers, after)
        reference = sum(before.get(x.name, 0.0) + _adjacent_ms(x, floats, before, only="Reformat") for x in originals)
        times[layer.name] = (reference, cost)
    return times


def _times(plan: EnginePlan) -> dict[str, float]:
    return dict(plan.report.layer_ms)


def _adjacent_ms(layer: Layer, plan: EnginePlan, times: Mapping[str, float], only: str = "") -> float:
    """Milliseconds of the adjacent data-movement layers and tables; producers are shared among their readers."""
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
    """The names that identify a layer in both engines: its source nodes, or the parts of its name."""
    return frozenset(layer.sources) or frozenset(layer.name.split(" + "))


def compare_engines(plans: list[EnginePlan], backend: Backend, config: BuildConfig) -> Ranking:
    """Times several engines on the same inputs. In a tie `Ranking.select` takes the first in the caller's order."""
    inputs = probe_inputs(plans[0].network, config.seed, probe_shapes(plans[0]))
    store = WeightStore(backend)
    bounds = []
    for plan in plans:
        bound = bind(plan, backend, store=store)
        bound.feed(inputs)
        bound.seconds(1)
        bounds.append(bound)
    return compare([partial(_run_once, b) for b in bounds], PRECISIONS)


def _run_once(bound: BoundEngine) -> float:
    return bound.seconds(1)[0]

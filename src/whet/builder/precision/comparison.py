"""Compares whole engines of several precisions, and finds layers that are not faster in quantized form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from whet.backends import Backend
from whet.builder.config import BuildConfig
from whet.builder.precision.permissions import computes_on_integers
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.measure.compare import Ranking, compare, measure_run
from whet.measure.policy import PRECISIONS
from whet.network import Layer
from whet.runtime import WeightStore, bind

_MOVING = ("QuantizeLinear", "DequantizeLinear", "Reformat")


def find_slow_layers(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> frozenset[str]:
    """Names of the layers that are not faster in quantized form, with the Q, DQ and reformats around it, than in floating point."""
    times = compare_layer_times(floats, integers, layers)
    return frozenset(name for name, (before, after) in times.items() if before and after >= before)


def compare_layer_times(floats: EnginePlan, integers: EnginePlan, layers: list[Layer]) -> dict[str, tuple[float, float]]:
    """(floating-point ms, quantized ms) of each layer with one quantized form, including adjacent Q, DQ and reformat layers."""
    before, after = _get_layer_times(floats), _get_layer_times(integers)
    found = {}
    for layer in layers:
        own = list_identifying_names(layer)
        mine = [x for x in integers.network.layers if computes_on_integers(x) and own & list_identifying_names(x)]
        theirs = [x for x in floats.network.layers if own & list_identifying_names(x)]
        if len(mine) != 1 or not theirs:
            continue
        cost = after.get(mine[0].name, 0.0) + sum_adjacent_ms(mine[0], integers, after)
        reference = sum(before.get(x.name, 0.0) + sum_adjacent_ms(x, floats, before, only="Reformat") for x in theirs)
        found[layer.name] = (reference, cost)
    return found


def _get_layer_times(plan: EnginePlan) -> dict[str, float]:
    return dict(plan.report.layer_ms)


def sum_adjacent_ms(layer: Layer, plan: EnginePlan, times: Mapping[str, float], only: str = "") -> float:
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


def list_identifying_names(layer: Layer) -> frozenset[str]:
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
    return compare([partial(measure_run, b) for b in bounds], PRECISIONS)
